//! Network partition between a node and the leader: pods continue, and the agent reports their exits once the network is back.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use e2e::{Lab, Role, TestCluster, container_status, eventually, wait_until};
use serde_json::Value;

/// An Indexed Job, so that a repeated index is noticed. Each run writes a line to a file, which does not need the network.
const WORK: &str = r#"
apiVersion: batch/v1
kind: Job
metadata: {name: work}
spec:
  completions: 6
  parallelism: 6
  completionMode: Indexed
  template:
    spec:
      nodeName: node2
      restartPolicy: Never
      volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
      containers:
      - name: c
        image: IMAGE
        command: [sh, -c, 'echo started $JOB_COMPLETION_INDEX >> /out/runs; until test -e /out/go; do sleep 0.2; done; echo result $JOB_COMPLETION_INDEX | tee /dev/termination-log; echo done $JOB_COMPLETION_INDEX >> /out/runs']
        volumeMounts: [{name: out, mountPath: /out}]
---
apiVersion: v1
kind: Pod
metadata: {name: steady}
spec:
  nodeName: node2
  containers: [{name: c, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done', mark-steady]}]
---
apiVersion: v1
kind: Pod
metadata: {name: half}
spec:
  nodeName: node2
  restartPolicy: Never
  volumes: [{name: out, hostPath: {path: /home/user1/out, type: DirectoryOrCreate}}]
  containers:
  - name: done
    image: IMAGE
    command: [sh, -c, 'until test -e /out/go; do sleep 0.2; done; echo good > /dev/termination-log']
    volumeMounts: [{name: out, mountPath: /out}]
  - {name: other, image: IMAGE, command: [sh, -c, 'trap exit TERM; while true; do sleep 1; done']}
"#;
const COUNT: usize = 6;

/// Drops all packets between node2 and the leader's host. With VERDICT, programs on node2 get an error or nothing.
const START_PARTITION: &str = "nft -f - <<'END'
table inet cut {
  chain in { type filter hook input priority 0; ip saddr 10.77.0.11 drop; }
  chain out { type filter hook output priority 0; ip daddr 10.77.0.11 VERDICT; }
}
END";
const END_PARTITION: &str = "nft delete table inet cut";
const UNREACHABLE: &str = "reject with icmp type net-unreachable";
const SILENT: &str = "drop";

struct Work {
    lab: Rc<Lab>,
    cluster: TestCluster,
    /// A pod that runs during the whole test.
    steady: Value,
}

/// A network partition, which ends on drop, so also if the test fails.
struct Partition(Rc<Lab>);

impl Drop for Partition {
    fn drop(&mut self) {
        self.0.root("node2", END_PARTITION);
    }
}

/// A cluster with pods on node2 that wait for a file, which needs no network.
fn work() -> Work {
    let lab = Lab::acquire();
    lab.root("node2", END_PARTITION);
    lab.load_busybox();
    lab.remove("out");
    let mut cluster = TestCluster::start(&lab);
    cluster.create(&lab, WORK);
    for pod in ["steady", "half"] {
        cluster.wait_for(pod, "condition=Ready");
    }
    wait_until(60, "all have started", || {
        recorded_runs(&lab, "started").len() == COUNT
    });
    let steady = cluster.pod("steady");
    wait_until(30, "the API server has their statuses", || {
        let job = cluster.json("get job work");
        job["status"]["ready"] == COUNT
    });
    Work {
        lab: Rc::new(lab),
        cluster,
        steady,
    }
}

fn recorded_runs(lab: &Lab, event: &str) -> Vec<String> {
    let text = lab.sh("cat out/runs").run().stdout;
    let lines = text.lines().filter_map(|line| line.strip_prefix(event));
    lines.map(|index| index.trim().to_owned()).collect()
}

impl Work {
    fn start_partition(&self, verdict: &str) -> Partition {
        let script = START_PARTITION.replace("VERDICT", verdict);
        self.lab.root("node2", &script).succeeded();
        Partition(Rc::clone(&self.lab))
    }

    #[track_caller]
    fn end_partition(&mut self, partition: Partition) {
        drop(partition);
        wait_until(60, "both nodes are Ready", || {
            self.cluster.has_ready_nodes(2)
        });
    }

    /// Makes all waiting pods exit.
    fn end_pods(&self) {
        self.lab.sh("touch out/go").run().succeeded();
        wait_until(30, "all are done", || {
            recorded_runs(&self.lab, "done").len() == COUNT
        });
    }

    /// Every index ran once, and the API server has its result.
    #[track_caller]
    fn assert_each_index_ran_once(&mut self) {
        let waited = "kubectl wait job/work --for=condition=Complete --timeout=50s";
        let (code, text) = self.cluster.try_shell(waited);
        let mut pods = Value::Null;
        // A write that was delayed by the partition may arrive after a newer one. The agent notices that and writes again.
        let settled = eventually(Duration::from_secs(20), || {
            pods = self.cluster.json("get pods --selector=job-name=work");
            let mut all = pods["items"].as_array()?.iter();
            let is_over = |pod: &Value| pod["status"]["phase"] == "Succeeded";
            all.all(is_over).then_some(())
        });
        assert!(code == 0 && settled.is_some(), "{text}\n{pods:#}");
        let pods = pods["items"].as_array().expect("a list");
        for pod in pods {
            let end = &container_status(pod, "c")["state"]["terminated"];
            let index = &pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"];
            let result = format!("result {}\n", index.as_str().unwrap_or_default());
            assert_eq!(end["message"], result, "{pod:#}");
        }
        for event in ["started", "done"] {
            let runs = recorded_runs(&self.lab, event);
            let indexes: BTreeSet<_> = runs.iter().collect();
            assert_eq!((runs.len(), indexes.len()), (COUNT, COUNT), "{runs:?}");
        }
        assert_eq!(pods.len(), COUNT);
    }

    /// The other pod's containers were not restarted.
    #[track_caller]
    fn assert_steady_pod_continued(&mut self) {
        let after = self.cluster.pod("steady");
        for field in ["containerID", "restartCount", "state"] {
            let (before, after) = (
                container_status(&self.steady, "c"),
                container_status(&after, "c"),
            );
            assert_eq!(before[field], after[field]);
        }
    }

    fn end(mut self) {
        self.lab.remove("out");
        self.cluster.run.write("exit 0\n");
        let _ = self.cluster.ends_within(30);
        self.lab.assert_nothing_left();
    }
}

/// Partitions the network for this long while pods exit. Leader and agent notice it after 15 s.
fn assert_pods_can_end_during_partition(verdict: &str, seconds: u64) {
    let mut work = work();
    let agent = work.lab.find("node2", Role::Agent);
    let partition = work.start_partition(verdict);
    work.end_pods();
    std::thread::sleep(Duration::from_secs(seconds));
    work.end_partition(partition);
    work.assert_each_index_ran_once();
    work.assert_steady_pod_continued();
    let half = work.cluster.pod("half");
    assert_eq!(
        container_status(&half, "done")["state"]["terminated"]["exitCode"],
        0
    );
    assert!(
        container_status(&half, "other")["state"]["running"].is_object(),
        "{half:#}"
    );
    assert_eq!(work.lab.find("node2", Role::Agent), agent);
    work.end();
}

#[test]
fn pods_that_exit_while_unreachable_run_once() {
    assert_pods_can_end_during_partition(UNREACHABLE, 27);
}

#[test]
fn pods_that_exit_during_packet_loss_run_once() {
    assert_pods_can_end_during_partition(SILENT, 30);
}

#[test]
fn results_survive_kills_of_agent_and_sandboxes() {
    let mut work = work();
    let partition = work.start_partition(UNREACHABLE);
    work.end_pods();
    // The containers have exited. Give the sandboxes time to write their checkpoints.
    std::thread::sleep(Duration::from_secs(3));
    let steady = work.lab.marked("mark-steady");
    let all = work.lab.processes("node2");
    let is_of_steady = |pid: u32| {
        let parent = |pid: u32| {
            all.iter()
                .find(|other| other.pid == pid)
                .map(|found| found.parent)
        };
        steady.iter().any(|(_, process)| {
            let above = std::iter::successors(Some(process.pid), |pid| parent(*pid));
            above.into_iter().any(|above| above == pid)
        })
    };
    let agent = work.lab.find("node2", Role::Agent);
    let sandboxes = all
        .iter()
        .filter(|process| process.args.contains(" internal sandbox") && !is_of_steady(process.pid));
    let mut pids = vec![agent.pid.to_string()];
    pids.extend(sandboxes.map(|sandbox| sandbox.pid.to_string()));
    assert!(pids.len() > COUNT, "{pids:?}");
    work.lab
        .root("node2", &format!("kill -KILL {}", pids.join(" ")));
    work.cluster.run.wait_for_stderr("node node2 is lost");
    // Longer than a sandbox waits for an agent before it gives up.
    std::thread::sleep(Duration::from_secs(50));
    work.end_partition(partition);
    work.assert_each_index_ran_once();
    work.assert_steady_pod_continued();
    let half = work.cluster.wait_for_phase("half", "Failed");
    let ends =
        ["done", "other"].map(|name| container_status(&half, name)["state"]["terminated"].clone());
    assert_eq!(ends[0]["exitCode"], 0, "{half:#}");
    assert_eq!(ends[0]["message"], "good\n", "{half:#}");
    assert_eq!(ends[1]["exitCode"], 137, "{half:#}");
    work.end();
}
