//! Resources of a pod that are changed while it runs.

use std::io;

use k8s_openapi::api::core::v1::PodSpec;
use linux::cgroup::{Group, Limits};

use super::{LinuxRuntime, World, limits};
use crate::life::restarts_to_resize;

impl<W: World> LinuxRuntime<W> {
    /// Gives the control groups of the pod, and of what runs in it, the limits of the spec. Where that can't be, the container
    /// keeps the resources that it has, in the spec too; then this is false, and is to be tried again.
    pub(super) fn resize(&self, spec: &mut PodSpec) -> bool {
        let Some(pod) = self.group.get() else {
            return true;
        };
        let mut all = true;
        let running = self.containers.borrow();
        let init = spec.init_containers.iter_mut().flatten();
        for container in init.chain(&mut spec.containers) {
            let mut same = running.values();
            let Some(running) = same.find(|running| running.name == container.name) else {
                continue;
            };
            let Some(group) = running.memory.group() else {
                continue;
            };
            let mut has = running.resources.borrow_mut();
            // One that is to be restarted gets another group.
            if *has == container.resources || restarts_to_resize(container, has.as_ref()) {
                continue;
            }
            match set(group, &limits::of_container(container)) {
                Ok(()) => has.clone_from(&container.resources),
                Err(error) => {
                    tracing::warn!(container = container.name, %error, "cannot change limits yet");
                    container.resources.clone_from(&has);
                    all = false;
                }
            }
        }
        // After those in it: a container that keeps more needs it here too.
        if let Err(error) = set(pod, &limits::of_pod(spec)) {
            tracing::warn!(%error, "cannot change the pod's limits yet");
            all = false;
        }
        all
    }
}

/// Sets limits, unless more memory is in use than would be allowed: the kernel would kill for it at once. Files that it can drop
/// instead don't count.
fn set(group: &Group, limits: &Limits) -> io::Result<()> {
    let used = group.usage().map_or(0, |usage| usage.working_set);
    match limits.memory {
        Some(limit) if used > limit => Err(io::Error::other(format!(
            "{used} bytes of memory are in use, the new limit is {limit}"
        ))),
        _ => group.limit(limits),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::super::testing::{Asked, bundle, runtime, within_patience};
    use super::super::{Running, oom, streams};
    use super::*;

    /// A pod's group with that of a container in it, which uses 4000 bytes: files that look like the kernel's.
    fn groups(dir: &std::path::Path) -> Group {
        let pod = Group::at(dir.join("pod"));
        for group in [&pod, &pod.below("a-0")] {
            group.make().unwrap();
            let put = |file: &str, text: &str| {
                std::fs::write(group.path().join(file), text).unwrap();
            };
            put("cpu.stat", "usage_usec 0\n");
            put("memory.current", "4000\n");
            put("memory.max", "9000");
        }
        pod
    }

    fn running(group: Group) -> Running {
        let resources = json!({"limits": {"memory": "9000"}});
        Running {
            name: "a".to_owned(),
            attempt: 0,
            started: Timestamp::now(),
            serial: 1,
            process: Rc::new(std::fs::File::open("/dev/null").unwrap().into()),
            plan: Default::default(),
            resources: RefCell::new(serde_json::from_value(resources).unwrap()),
            memory: Rc::new(oom::Watch::new(Some(group))),
            attachable: streams::Attachable {
                taps: Rc::default(),
                stdin: None,
                terminal: None,
                stdin_once: false,
            },
            alive: Default::default(),
        }
    }

    #[tokio::test]
    async fn a_container_keeps_what_it_has_until_it_uses_less() {
        within_patience(async {
            let dir = tempfile::tempdir().unwrap();
            let pod = groups(dir.path());
            let own = pod.below("a-0");
            let of = |memory: &str, policy: &str| {
                let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
                bundle(json!({"containers": [{"name": "a", "resizePolicy": policy,
                    "resources": {"limits": {"memory": memory}}}]}))
            };
            let (runtime, _inner) = runtime(Asked::default(), of("9000", "NotRequired"));
            let _ = runtime.group.set(pod.clone());
            let one = running(own.clone());
            runtime.containers.borrow_mut().insert("1".to_owned(), one);
            let max =
                |group: &Group| std::fs::read_to_string(group.path().join("memory.max")).unwrap();
            let given = |bundle: &pod_protocol::Bundle| {
                let spec = bundle.pod.spec.clone().unwrap();
                let resources = spec.containers[0].resources.clone().unwrap();
                resources.limits.unwrap()["memory"].0.clone()
            };

            let (done, all) = runtime.put_bundle(of("3000", "NotRequired")).await;
            assert_eq!((given(&done).as_str(), all), ("9000", false));
            assert_eq!(
                (max(&own), max(&pod)),
                ("9000".to_owned(), "9000".to_owned())
            );

            // One that is restarted for it is left alone, but the pod's limit waits for that.
            let (done, all) = runtime.put_bundle(of("3000", "RestartContainer")).await;
            assert_eq!((given(&done).as_str(), all), ("3000", false));
            assert_eq!(
                (max(&own), max(&pod)),
                ("9000".to_owned(), "9000".to_owned())
            );

            for group in [&own, &pod] {
                std::fs::write(group.path().join("memory.current"), "2000").unwrap();
            }
            let (done, all) = runtime.put_bundle(of("3000", "NotRequired")).await;
            assert_eq!((given(&done).as_str(), all), ("3000", true));
            assert_eq!(
                (max(&own), max(&pod)),
                ("3000".to_owned(), "3000".to_owned())
            );
        })
        .await;
    }

    /// Files that look like a group; what the kernel makes of them is tried in tests/qemu.
    #[test]
    fn a_limit_below_what_is_in_use_waits() {
        let dir = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
        put("cpu.stat", "usage_usec 0\n");
        put("memory.stat", "anon 3000\ninactive_file 1000\n");
        put("memory.current", "5000\n");
        put("memory.max", "9000");
        let limit = |bytes: u64| {
            let limits = Limits {
                memory: Some(bytes),
                ..Limits::default()
            };
            set(&Group::at(dir.path()), &limits)
        };
        let max = || std::fs::read_to_string(dir.path().join("memory.max")).unwrap();
        let error = limit(3999).unwrap_err().to_string();
        assert_eq!(
            (max().as_str(), error.as_str()),
            (
                "9000",
                "4000 bytes of memory are in use, the new limit is 3999"
            )
        );
        limit(4000).unwrap();
        assert_eq!(max(), "4000");
    }
}
