//! Whether this is a node that the pod asks for.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};
use pod_protocol::Problem;

use super::{NODE_AFFINITY, Space, predicate};

pub(super) fn matches(spec: &PodSpec, space: &Space) -> Result<(), Problem> {
    let selected = spec
        .node_selector
        .iter()
        .flatten()
        .all(|(key, value)| space.labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|node| {
            node.required_during_scheduling_ignored_during_execution
                .as_ref()
        });
    let near = required.is_none_or(|required| {
        let mut terms = required.node_selector_terms.iter();
        terms.any(|term| term_matches(term, space))
    });
    if selected && near {
        return Ok(());
    }
    let why = "node(s) didn't match Pod's node affinity/selector";
    Err(predicate(NODE_AFFINITY, why))
}

/// A term without requirements matches nothing.
fn term_matches(term: &NodeSelectorTerm, space: &Space) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let label = |need: &NodeSelectorRequirement| {
        requirement_matches(need, space.labels.get(&need.key).map(String::as_str))
    };
    let field = |need: &NodeSelectorRequirement| {
        need.key == "metadata.name" && requirement_matches(need, Some(space.node))
    };
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(label)
        && fields.iter().all(field)
}

fn requirement_matches(need: &NodeSelectorRequirement, have: Option<&str>) -> bool {
    let values = need.values.as_deref().unwrap_or_default();
    let listed = have.is_some_and(|have| values.iter().any(|value| value == have));
    let compared = || {
        let have: i64 = have?.parse().ok()?;
        let value: i64 = values.first()?.parse().ok()?;
        Some(have.cmp(&value))
    };
    match need.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        "Exists" => have.is_some(),
        "DoesNotExist" => have.is_none(),
        "Gt" => compared().is_some_and(std::cmp::Ordering::is_gt),
        "Lt" => compared().is_some_and(std::cmp::Ordering::is_lt),
        _ => false,
    }
}
