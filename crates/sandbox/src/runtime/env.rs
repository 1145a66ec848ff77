//! A container's environment and command, with `$(NAME)` references expanded. Pure.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Container, EnvVar};

use crate::container_runtime::ImageDefaults;

/// Addresses that only the sandbox knows.
#[derive(Debug, Default)]
pub struct PodAddresses {
    /// The pod's.
    pub pod_ips: Vec<String>,
    /// The node's.
    pub host_ips: Vec<String>,
}

/// The variables of a container: the image's, then the pod's, each name once, in order.
pub fn environment(
    image: &ImageDefaults,
    own: &[EnvVar],
    hostname: &str,
    addresses: &PodAddresses,
) -> Vec<(String, String)> {
    let mut variables = Variables::default();
    variables.set(
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    );
    variables.set("HOSTNAME", hostname);
    for pair in &image.env {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        variables.set(name, value);
    }
    // As upstream, references see the pod's variables only, not the image's.
    let mut known = HashMap::new();
    for variable in own {
        let value = match field_path(variable) {
            Some(path) => addresses.resolve(path),
            None => expand(variable.value.as_deref().unwrap_or_default(), &known),
        };
        known.insert(variable.name.clone(), value.clone());
        variables.set(&variable.name, &value);
    }
    variables.0
}

/// Sets a variable unless it is set already.
pub fn set_default(env: &mut Vec<(String, String)>, name: &str, value: &str) {
    if !env.iter().any(|(found, _)| found == name) {
        env.push((name.to_owned(), value.to_owned()));
    }
}

/// The pod's own variables of `env`, to which its command and subPaths may refer.
pub fn own_variables(env: &[(String, String)], own: &[EnvVar]) -> HashMap<String, String> {
    let is_own = |name: &str| own.iter().any(|variable| variable.name == name);
    let own = env.iter().filter(|(name, _)| is_own(name));
    own.cloned().collect()
}

/// The program and its arguments: `command` and `args` of the pod, else ENTRYPOINT and CMD of the image.
pub fn command(
    image: &ImageDefaults,
    container: &Container,
    known: &HashMap<String, String>,
) -> Vec<String> {
    let expanded = |list: &Option<Vec<String>>| -> Vec<String> {
        let list = list.as_deref().unwrap_or_default();
        list.iter().map(|arg| expand(arg, known)).collect()
    };
    let (command, args) = (expanded(&container.command), expanded(&container.args));
    match (command.is_empty(), args.is_empty()) {
        (true, true) => [image.entrypoint.clone(), image.cmd.clone()].concat(),
        (true, false) => [image.entrypoint.clone(), args].concat(),
        (false, _) => [command, args].concat(),
    }
}

/// Expands `$(NAME)`. `$$` becomes `$`, and references to unknown names stay.
pub fn expand(text: &str, known: &HashMap<String, String>) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        result.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            result.push('$');
            rest = after;
        } else if let Some((name, after)) =
            rest.strip_prefix('(').and_then(|open| open.split_once(')'))
        {
            match known.get(name) {
                Some(value) => result.push_str(value),
                None => result.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            result.push('$');
        }
    }
    result.push_str(rest);
    result
}

fn field_path(variable: &EnvVar) -> Option<&str> {
    let source = variable.value_from.as_ref()?.field_ref.as_ref()?;
    Some(&source.field_path)
}

impl PodAddresses {
    fn resolve(&self, field_path: &str) -> String {
        let first = |list: &[String]| list.first().cloned().unwrap_or_default();
        match field_path {
            "status.podIP" => first(&self.pod_ips),
            "status.podIPs" => self.pod_ips.join(","),
            "status.hostIP" => first(&self.host_ips),
            "status.hostIPs" => self.host_ips.join(","),
            _ => String::new(),
        }
    }
}

#[derive(Default)]
struct Variables(Vec<(String, String)>);

impl Variables {
    fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|(found, _)| found == name) {
            Some((_, old)) => value.clone_into(old),
            None => self.0.push((name.to_owned(), value.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known() -> HashMap<String, String> {
        [("A", "1"), ("B", "two")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into()
    }

    #[test]
    fn references_are_expanded() {
        for (text, want) in [
            ("x$(A)y$(B)", "x1ytwo"),
            ("$(C)", "$(C)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$A $", "$A $"),
            ("$(A", "$(A"),
            ("", ""),
        ] {
            assert_eq!(expand(text, &known()), want, "{text}");
        }
    }

    fn plain(name: &str, value: &str) -> EnvVar {
        EnvVar {
            name: name.into(),
            value: Some(value.into()),
            value_from: None,
        }
    }

    #[test]
    fn later_variables_override_and_see_earlier_ones() {
        let image = ImageDefaults {
            env: vec!["PATH=/bin".into(), "LANG=C".into()],
            ..Default::default()
        };
        let own = [
            plain("A", "1"),
            plain("B", "$(A)$(LANG)"),
            plain("LANG", "de"),
        ];
        let env = environment(&image, &own, "host", &PodAddresses::default());
        let get = |name: &str| {
            env.iter()
                .find(|(found, _)| found == name)
                .map(|(_, value)| value.as_str())
        };
        assert_eq!(get("PATH"), Some("/bin"));
        assert_eq!(get("B"), Some("1$(LANG)"));
        assert_eq!(get("LANG"), Some("de"));
        assert_eq!(get("HOSTNAME"), Some("host"));
    }

    #[test]
    fn command_replaces_entrypoint_and_cmd() {
        let image = ImageDefaults {
            entrypoint: vec!["e".into()],
            cmd: vec!["c".into()],
            ..Default::default()
        };
        let command_line = |command: Option<&str>, args: Option<&str>| {
            let list = |arg: Option<&str>| arg.map(|arg| vec![arg.to_owned()]);
            let container = Container {
                command: list(command),
                args: list(args),
                ..Default::default()
            };
            super::command(&image, &container, &HashMap::new()).join(" ")
        };
        assert_eq!(command_line(None, None), "e c");
        assert_eq!(command_line(None, Some("a")), "e a");
        assert_eq!(command_line(Some("x"), None), "x");
        assert_eq!(command_line(Some("x"), Some("a")), "x a");
    }
}
