//! In-place resize of a pod's resources.

use std::io;

use k8s_openapi::api::core::v1::PodSpec;
use linux::cgroup::{Cgroup, CgroupLimits};

use super::{LinuxRuntime, NodeServices, limits};
use crate::lifecycle::resize_requires_restart;

impl<S: NodeServices> LinuxRuntime<S> {
    /// Sets the limits of the spec on the cgroups of the pod and of its running containers. A container whose limits cannot be set
    /// yet keeps its resources, and `spec` is changed to show these. Returns false in that case, and the caller retries.
    pub(super) fn resize(&self, spec: &mut PodSpec) -> bool {
        let Some(pod) = self.cgroup.get() else {
            return true;
        };
        let mut is_complete = true;
        let containers = self.containers.borrow();
        let init = spec.init_containers.iter_mut().flatten();
        for container in init.chain(&mut spec.containers) {
            let mut all = containers.values();
            let Some(running) = all.find(|running| running.name == container.name) else {
                continue;
            };
            let Some(cgroup) = running.oom.cgroup() else {
                continue;
            };
            let mut current = running.resources.borrow_mut();
            // A container that is restarted for the resize gets a new cgroup.
            if *current == container.resources
                || resize_requires_restart(container, current.as_ref())
            {
                continue;
            }
            match set_limits(cgroup, &limits::container_limits(container)) {
                Ok(()) => current.clone_from(&container.resources),
                Err(error) => {
                    tracing::warn!(container = container.name, %error, "cannot resize container yet");
                    container.resources.clone_from(&current);
                    is_complete = false;
                }
            }
        }
        // After the containers: the pod's limit must include the resources that a container keeps.
        if let Err(error) = set_limits(pod, &limits::pod_limits(spec)) {
            tracing::warn!(%error, "cannot resize pod yet");
            is_complete = false;
        }
        is_complete
    }
}

/// Sets limits, unless the working set exceeds the memory limit: the kernel would OOM-kill at once.
fn set_limits(cgroup: &Cgroup, limits: &CgroupLimits) -> io::Result<()> {
    let used = cgroup.usage().map_or(0, |usage| usage.working_set);
    match limits.memory {
        Some(limit) if used > limit => Err(io::Error::other(format!(
            "{used} bytes of memory are in use, the new limit is {limit}"
        ))),
        _ => cgroup.set_limits(limits),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use k8s_openapi::jiff::Timestamp;
    use serde_json::json;

    use super::super::testing::{RecordingServices, bundle, run_local, runtime};
    use super::super::{OomWatch, RunningContainer, streaming};
    use super::*;

    /// Fake cgroups of a pod and of a container that uses 4000 bytes.
    fn fake_cgroups(dir: &std::path::Path) -> Cgroup {
        let pod = Cgroup::at(dir.join("pod"));
        for group in [&pod, &pod.child("a-0")] {
            group.create().unwrap();
            let put = |file: &str, text: &str| {
                std::fs::write(group.path().join(file), text).unwrap();
            };
            put("cpu.stat", "usage_usec 0\n");
            put("memory.current", "4000\n");
            put("memory.max", "9000");
        }
        pod
    }

    fn running(cgroup: Cgroup) -> RunningContainer {
        let resources = json!({"limits": {"memory": "9000"}});
        RunningContainer {
            name: "a".to_owned(),
            attempt: 0,
            started_at: Timestamp::now(),
            serial: 1,
            process: Rc::new(std::fs::File::open("/dev/null").unwrap().into()),
            plan: Default::default(),
            resources: RefCell::new(serde_json::from_value(resources).unwrap()),
            oom: Rc::new(OomWatch::new(Some(cgroup))),
            attachable: streaming::Attachable {
                subscribers: Rc::default(),
                stdin: None,
                terminal: None,
                stdin_once: false,
            },
            alive: Default::default(),
        }
    }

    #[tokio::test]
    async fn memory_limit_is_lowered_once_usage_allows() {
        run_local(async {
            let dir = tempfile::tempdir().unwrap();
            let pod = fake_cgroups(dir.path());
            let own = pod.child("a-0");
            let bundle_with = |memory: &str, policy: &str| {
                let policy = json!([{"resourceName": "memory", "restartPolicy": policy}]);
                bundle(json!({"containers": [{"name": "a", "resizePolicy": policy,
                    "resources": {"limits": {"memory": memory}}}]}))
            };
            let (runtime, _inner) = runtime(
                RecordingServices::default(),
                bundle_with("9000", "NotRequired"),
            );
            let _ = runtime.cgroup.set(pod.clone());
            let container = running(own.clone());
            let id = "1".to_owned();
            runtime.containers.borrow_mut().insert(id, container);
            let max =
                |group: &Cgroup| std::fs::read_to_string(group.path().join("memory.max")).unwrap();
            let applied = |bundle: &pod_protocol::Bundle| {
                let spec = bundle.pod.spec.clone().unwrap();
                let resources = spec.containers[0].resources.clone().unwrap();
                resources.limits.unwrap()["memory"].0.clone()
            };

            let (done, all) = runtime.put_bundle(bundle_with("3000", "NotRequired")).await;
            assert_eq!((applied(&done).as_str(), all), ("9000", false));
            assert_eq!(
                (max(&own), max(&pod)),
                ("9000".to_owned(), "9000".to_owned())
            );

            // A container that is restarted for the resize is left alone; the pod's limit waits for the restart.
            let (done, all) = runtime
                .put_bundle(bundle_with("3000", "RestartContainer"))
                .await;
            assert_eq!((applied(&done).as_str(), all), ("3000", false));
            assert_eq!(
                (max(&own), max(&pod)),
                ("9000".to_owned(), "9000".to_owned())
            );

            for group in [&own, &pod] {
                std::fs::write(group.path().join("memory.current"), "2000").unwrap();
            }
            let (done, all) = runtime.put_bundle(bundle_with("3000", "NotRequired")).await;
            assert_eq!((applied(&done).as_str(), all), ("3000", true));
            assert_eq!(
                (max(&own), max(&pod)),
                ("3000".to_owned(), "3000".to_owned())
            );
        })
        .await;
    }

    /// With a fake cgroup; tests/qemu has tests against the kernel.
    #[test]
    fn limit_below_working_set_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| std::fs::write(dir.path().join(file), text).unwrap();
        put("cpu.stat", "usage_usec 0\n");
        put("memory.stat", "anon 3000\ninactive_file 1000\n");
        put("memory.current", "5000\n");
        put("memory.max", "9000");
        let limit = |bytes: u64| {
            let limits = CgroupLimits {
                memory: Some(bytes),
                ..CgroupLimits::default()
            };
            set_limits(&Cgroup::at(dir.path()), &limits)
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
