//! Pods that check their own environment. Their scripts print only failures, so that one cluster can serve many checks.

use serde_json::{Value, json};

use crate::{BUSYBOX, TestCluster};

/// Shell functions for such a script: `is NAME EXPECTED ACTUAL`, `fails COMMAND…`, `works COMMAND…`. The output of the last command
/// is in `$output`.
const SHELL_FUNCTIONS: &str = r#"
is() { [ "$2" = "$3" ] || echo "$1 is '$3', not '$2'"; }
fails() { if output=$("$@" 2>&1); then echo "should fail: $*"; fi; }
works() { output=$("$@" 2>&1) || echo "should work: $*: $output"; }
"#;

/// A container whose script checks its environment; `more` has further fields of the container.
pub fn checking_container(name: &str, more: Value, script: &str) -> Value {
    // The API server would expand `$(…)` as a variable reference; `$$` escapes it.
    let script = format!("{SHELL_FUNCTIONS}\n{script}\ntrue").replace('$', "$$");
    let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script]});
    merged(own, more)
}

/// A pod with restart policy Never; `more` has further fields of its `spec`.
pub fn pod(name: &str, more: Value, containers: &[Value]) -> Value {
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": containers});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": merged(spec, more)})
}

/// A pod with one container that checks its environment.
pub fn checking_pod(name: &str, more: Value, container: Value, script: &str) -> Value {
    pod(name, more, &[checking_container("main", container, script)])
}

/// Adds the fields of `more` to an object. Fields of `more` take precedence.
pub fn merged(mut object: Value, more: Value) -> Value {
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

impl TestCluster {
    /// Creates objects.
    #[track_caller]
    pub fn create_objects(&mut self, objects: &[Value]) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.shell(&format!(
            "kubectl create --validate=ignore --filename=- <<'END OF OBJECTS'\n{list}\nEND OF OBJECTS"
        ));
    }

    /// Waits until these pods have succeeded. Fails if a pod does not succeed, or if one of its containers printed anything.
    #[track_caller]
    pub fn assert_checks_pass(&mut self, pods: &[&str]) {
        let mut failures = Vec::new();
        for pod in pods {
            let wait = format!(
                "kubectl wait pod/{pod} --for=jsonpath={{.status.phase}}=Succeeded --timeout=30s"
            );
            if self.try_shell(&wait).0 != 0 {
                let status = self.shell(&format!("kubectl get pod {pod} --output=jsonpath={{.status.phase}}:{{.status.containerStatuses[*].state}}"));
                failures.push(format!("{pod}: {status}\n{}", self.events(pod)));
            }
            let (_, log) = self.try_shell(&format!("kubectl logs {pod} --all-containers"));
            if !log.is_empty() {
                failures.push(format!("{pod}: {log}"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    }
}
