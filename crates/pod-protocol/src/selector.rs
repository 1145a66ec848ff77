//! Operators of selectors.

/// `operator` of a node selector or of a restart rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SelectorOperator {
    /// The value is listed.
    In,
    /// The value is missing, or not listed.
    NotIn,
    /// There is a value.
    Exists,
    /// There is no value.
    DoesNotExist,
    /// The value is an integer larger than the first one listed.
    Gt,
    /// The value is an integer smaller than the first one listed.
    Lt,
}

impl SelectorOperator {
    /// `None` if it has another name.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "In" => Some(Self::In),
            "NotIn" => Some(Self::NotIn),
            "Exists" => Some(Self::Exists),
            "DoesNotExist" => Some(Self::DoesNotExist),
            "Gt" => Some(Self::Gt),
            "Lt" => Some(Self::Lt),
            _ => None,
        }
    }

    /// Whether `value` satisfies the operator with these listed values. Values are compared as text, except by `Gt` and `Lt`.
    pub fn matches(self, value: Option<&str>, listed: &[impl AsRef<str>]) -> bool {
        let is_listed =
            || value.is_some_and(|value| listed.iter().any(|one| one.as_ref() == value));
        let order = || {
            let value: i64 = value?.parse().ok()?;
            let limit: i64 = listed.first()?.as_ref().parse().ok()?;
            Some(value.cmp(&limit))
        };
        match self {
            Self::In => is_listed(),
            Self::NotIn => !is_listed(),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
            Self::Gt => order().is_some_and(std::cmp::Ordering::is_gt),
            Self::Lt => order().is_some_and(std::cmp::Ordering::is_lt),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_match_as_in_upstream() {
        for (operator, value, listed, want) in [
            ("In", Some("a"), &["a", "b"][..], true),
            ("In", None, &["a"], false),
            ("NotIn", Some("a"), &["a"], false),
            ("NotIn", None, &["a"], true),
            ("Exists", Some(""), &[], true),
            ("DoesNotExist", Some("a"), &[], false),
            ("Gt", Some("10"), &["9"], true),
            ("Gt", Some("x"), &["9"], false),
            ("Lt", Some("9"), &["10"], true),
            ("Lt", Some("9"), &[], false),
        ] {
            let parsed = SelectorOperator::parse(operator).unwrap();
            assert_eq!(parsed.matches(value, listed), want, "{operator} {value:?}");
        }
        assert_eq!(SelectorOperator::parse("in"), None);
    }
}
