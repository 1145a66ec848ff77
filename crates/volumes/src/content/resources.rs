//! `resourceFieldRef`: a container's limits and requests, divided and rounded up.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, ResourceFieldSelector, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use quantity::Amount;

use super::ContentError;

/// Resources whose unset limit defaults to the node's allocatable amount.
const DEFAULTED: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// The value of a limit or request of `container`, unless the selector names another container.
pub fn resource(
    pod: &Pod,
    container: &str,
    selector: &ResourceFieldSelector,
    allocatable: &BTreeMap<String, Quantity>,
) -> Result<String, ContentError> {
    let name = selector
        .container_name
        .as_deref()
        .filter(|name| !name.is_empty())
        .unwrap_or(container);
    let resources = container_resources(pod, name)
        .ok_or_else(|| ContentError::ContainerNotFound(name.to_owned()))?;
    let unsupported = || ContentError::UnsupportedResource(selector.resource.clone());
    let (list, resource) = selector.resource.split_once('.').ok_or_else(unsupported)?;
    if !DEFAULTED.contains(&resource) && !resource.starts_with("hugepages-") {
        return Err(unsupported());
    }
    let value_in = |list: &Option<BTreeMap<String, Quantity>>| {
        list.as_ref().and_then(|list| list.get(resource)).cloned()
    };
    let quantity = match list {
        "limits" => {
            let limit = resources.and_then(|resources| value_in(&resources.limits));
            match limit {
                Some(limit) if !amount(&limit)?.is_zero() => Some(limit),
                // Huge pages cannot be overcommitted, so the node's amount is not a default.
                limit if !DEFAULTED.contains(&resource) => limit,
                limit => allocatable.get(resource).cloned().or(limit),
            }
        }
        "requests" => resources.and_then(|resources| value_in(&resources.requests)),
        _ => return Err(unsupported()),
    };
    let value = quantity
        .as_ref()
        .map(amount)
        .transpose()?
        .unwrap_or_default();
    let divisor = match &selector.divisor {
        Some(divisor) if !amount(divisor)?.is_zero() => amount(divisor)?,
        _ => amount(&Quantity("1".to_owned()))?,
    };
    let (number, by) = match resource {
        "cpu" => (value.milli_value(), divisor.milli_value()),
        _ => (value.value(), divisor.value()),
    };
    Ok(divide_rounding_up(number, by).to_string())
}

/// The resources of a container or init container; the inner `None` is a container without resources.
fn container_resources<'a>(pod: &'a Pod, name: &str) -> Option<Option<&'a ResourceRequirements>> {
    let spec = pod.spec.as_ref()?;
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|container| container.name == name)
        .map(|container| container.resources.as_ref())
}

fn amount(quantity: &Quantity) -> Result<Amount, ContentError> {
    Amount::of(quantity).ok_or_else(|| ContentError::InvalidQuantity(quantity.0.clone()))
}

fn divide_rounding_up(number: i64, by: i64) -> i64 {
    let (quotient, rest) = (number.wrapping_div(by), number.wrapping_rem(by));
    quotient + i64::from(rest != 0 && (rest > 0) == (by > 0))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Container, PodSpec};

    use super::*;

    fn list(entries: &[(&str, &str)]) -> BTreeMap<String, Quantity> {
        let entry =
            |(name, value): &(&str, &str)| ((*name).to_owned(), Quantity((*value).to_owned()));
        entries.iter().map(entry).collect()
    }

    fn value(resource_name: &str, divisor: Option<&str>, container: Option<&str>) -> String {
        let pod = Pod {
            spec: Some(PodSpec {
                containers: vec![Container {
                    name: "main".to_owned(),
                    resources: Some(ResourceRequirements {
                        limits: Some(list(&[("cpu", "1250m"), ("hugepages-2Mi", "4Mi")])),
                        requests: Some(list(&[("memory", "33Mi")])),
                        ..Default::default()
                    }),
                    ..Default::default()
                }],
                init_containers: Some(vec![Container {
                    name: "first".to_owned(),
                    ..Default::default()
                }]),
                ..Default::default()
            }),
            ..Default::default()
        };
        let selector = ResourceFieldSelector {
            container_name: container.map(str::to_owned),
            divisor: divisor.map(|text| Quantity(text.to_owned())),
            resource: resource_name.to_owned(),
        };
        let allocatable = list(&[("cpu", "4"), ("memory", "8Gi"), ("ephemeral-storage", "1G")]);
        resource(&pod, "main", &selector, &allocatable).unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn values_are_divided_and_rounded_up() {
        assert_eq!(value("limits.cpu", None, None), "2");
        assert_eq!(value("limits.cpu", Some("1m"), None), "1250");
        assert_eq!(value("limits.cpu", Some("0"), None), "2");
        assert_eq!(value("requests.memory", Some("1Mi"), None), "33");
        assert_eq!(value("requests.memory", Some("1G"), None), "1");
        assert_eq!(value("limits.hugepages-2Mi", Some("1Mi"), None), "4");
        assert_eq!(value("requests.cpu", None, None), "0");
    }

    #[test]
    fn unset_limits_default_to_allocatable() {
        assert_eq!(value("limits.memory", Some("1Gi"), None), "8");
        assert_eq!(value("limits.cpu", None, Some("first")), "4");
        assert_eq!(value("limits.ephemeral-storage", None, None), "1000000000");
    }

    #[test]
    fn unknown_containers_and_resources_are_errors() {
        assert_eq!(
            value("limits.cpu", None, Some("x")),
            "container x not found"
        );
        assert_eq!(
            value("limits.gpu", None, None),
            "unsupported container resource : limits.gpu"
        );
        assert_eq!(
            value("cpu", None, None),
            "unsupported container resource : cpu"
        );
    }
}
