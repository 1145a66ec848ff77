//! Pods that check their own environment. Their scripts print only failures, so that one cluster can serve many checks.

use serde_json::{Value, json};

use crate::{BUSYBOX, Cluster};

/// Shell functions for such a script: `is WHAT EXPECTED ACTUAL`, `fails COMMAND…`, `works COMMAND…`.
const WORDS: &str = r#"
is() { [ "$2" = "$3" ] || echo "$1 is '$3', not '$2'"; }
fails() { if said=$("$@" 2>&1); then echo "should fail: $*"; fi; }
works() { said=$("$@" 2>&1) || echo "should work: $*: $said"; }
"#;

/// A container whose script checks its environment; `more` has further fields of the container.
pub fn looking(name: &str, more: Value, script: &str) -> Value {
    // The API server would expand `$(…)` as a variable reference; `$$` escapes it.
    let script = format!("{WORDS}\n{script}\ntrue").replace('$', "$$");
    let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script]});
    merged(own, more)
}

/// A pod with restart policy Never; `more` has further fields of its `spec`.
pub fn pod(name: &str, more: Value, containers: &[Value]) -> Value {
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": containers});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": merged(spec, more)})
}

/// A pod with one container that checks its environment.
pub fn looking_pod(name: &str, more: Value, container: Value, script: &str) -> Value {
    pod(name, more, &[looking("main", container, script)])
}

/// Adds the fields of `more` to an object. Fields of `more` take precedence.
pub fn merged(mut into: Value, more: Value) -> Value {
    if let (Some(into), Value::Object(more)) = (into.as_object_mut(), more) {
        into.extend(more);
    }
    into
}

impl Cluster {
    /// Creates objects.
    #[track_caller]
    pub fn create_objects(&mut self, objects: &[Value]) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        self.ask(&format!(
            "kubectl create --validate=ignore --filename=- <<'END OF OBJECTS'\n{list}\nEND OF OBJECTS"
        ));
    }

    /// Waits until these pods have succeeded. Fails if a pod does not succeed, or if one of its containers printed anything.
    #[track_caller]
    pub fn find_all_right(&mut self, pods: &[&str]) {
        let mut wrong = Vec::new();
        for pod in pods {
            let waited = format!(
                "kubectl wait pod/{pod} --for=jsonpath={{.status.phase}}=Succeeded --timeout=30s"
            );
            if self.try_ask(&waited).0 != 0 {
                let status = self.ask(&format!("kubectl get pod {pod} --output=jsonpath={{.status.phase}}:{{.status.containerStatuses[*].state}}"));
                wrong.push(format!("{pod}: {status}\n{}", self.events(pod)));
            }
            let (_, said) = self.try_ask(&format!("kubectl logs {pod} --all-containers"));
            if !said.is_empty() {
                wrong.push(format!("{pod}: {said}"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    }
}
