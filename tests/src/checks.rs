//! Pods that look around themselves. Their scripts print only what is wrong, so that one cluster can answer many questions.

use serde_json::{Value, json};

use crate::{BUSYBOX, Cluster};

/// What such a script may say: `is WHAT EXPECTED ACTUAL`, `fails COMMAND…`, `works COMMAND…`.
const WORDS: &str = r#"
is() { [ "$2" = "$3" ] || echo "$1 is '$3', not '$2'"; }
fails() { if said=$("$@" 2>&1); then echo "should fail: $*"; fi; }
works() { said=$("$@" 2>&1) || echo "should work: $*: $said"; }
"#;

/// A container whose script looks around; `more` has its other fields.
pub fn looking(name: &str, more: Value, script: &str) -> Value {
    // The API's own `$(…)` is not the shell's.
    let script = format!("{WORDS}\n{script}\ntrue").replace('$', "$$");
    let own = json!({"name": name, "image": BUSYBOX, "command": ["sh", "-c", script]});
    merged(own, more)
}

/// A pod that ends when its containers have; `more` has the other fields of its `spec`.
pub fn pod(name: &str, more: Value, containers: &[Value]) -> Value {
    let spec = json!({"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": containers});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": merged(spec, more)})
}

/// A pod with one container that looks around.
pub fn looking_pod(name: &str, more: Value, container: Value, script: &str) -> Value {
    pod(name, more, &[looking("main", container, script)])
}

/// An object with the fields of another, which win.
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

    /// Waits for the end of pods that look around, and fails if one of them, or an exit code, says that something is wrong.
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
