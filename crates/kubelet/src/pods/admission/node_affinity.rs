//! Node selector and required node affinity.

use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, PodSpec};
use pod_protocol::SelectorOperator;

use super::{AdmissionContext, PodRejection, RejectionReason, predicate_failed};

pub(super) fn check(spec: &PodSpec, context: &AdmissionContext) -> Result<(), PodRejection> {
    let selected = spec
        .node_selector
        .iter()
        .flatten()
        .all(|(key, value)| context.labels.get(key) == Some(value));
    let required = spec
        .affinity
        .as_ref()
        .and_then(|affinity| affinity.node_affinity.as_ref())
        .and_then(|node| {
            node.required_during_scheduling_ignored_during_execution
                .as_ref()
        });
    let affine = required.is_none_or(|required| {
        let mut terms = required.node_selector_terms.iter();
        terms.any(|term| term_matches(term, context))
    });
    if selected && affine {
        return Ok(());
    }
    Err(predicate_failed(
        RejectionReason::NodeAffinity,
        "node(s) didn't match Pod's node affinity/selector",
    ))
}

/// A term without requirements matches nothing.
fn term_matches(term: &NodeSelectorTerm, context: &AdmissionContext) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let label = |requirement: &NodeSelectorRequirement| {
        requirement_matches(
            requirement,
            context.labels.get(&requirement.key).map(String::as_str),
        )
    };
    let field = |requirement: &NodeSelectorRequirement| {
        requirement.key == "metadata.name" && requirement_matches(requirement, Some(context.node))
    };
    !(expressions.is_empty() && fields.is_empty())
        && expressions.iter().all(label)
        && fields.iter().all(field)
}

fn requirement_matches(requirement: &NodeSelectorRequirement, have: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let operator = SelectorOperator::parse(&requirement.operator);
    operator.is_some_and(|operator| operator.matches(have, values))
}
