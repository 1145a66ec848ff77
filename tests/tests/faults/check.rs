//! Polls the cluster after a round until its state is the one that the model allows, or until a time-out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use e2e::{Lab, Process, TestCluster};
use serde_json::Value;

use crate::fault::{Fault, NODES, Target};
use crate::inject::{Injected, marked};
use crate::model::{self, Restarts};
use crate::workload::{COMPLETIONS, DIR, exit_code};

/// Time in which the cluster must recover.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(150);
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// A pod that runs during all rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct LongRunningPod {
    pub name: String,
    pub node: &'static str,
    pub target: Target,
    uid: String,
    address: String,
    containers: Vec<Container>,
    /// The content of its volume that outlives the pod, if it has one.
    volume: Option<VolumeContent>,
}

/// The content of the volume of a [`Target::Keeper`].
#[derive(Debug, Clone, PartialEq)]
struct VolumeContent {
    /// Written once, by the first run that found the volume empty.
    id: String,
    /// The length of the sequence.
    records: u64,
}

#[derive(Debug, Clone, PartialEq)]
struct Container {
    name: String,
    id: String,
    started: String,
    restarts: u64,
    /// How many runs have written a line to the pod's emptyDir.
    runs: u64,
}

/// A deviation from the expected state.
#[derive(Debug)]
enum Deviation {
    /// The cluster may still recover.
    Transient(String),
    /// The cluster cannot recover.
    Permanent(String),
}

use Deviation::{Permanent, Transient};

/// The pods that run before a round.
pub fn long_running_pods(
    lab: &Lab,
    cluster: &mut TestCluster,
) -> Result<Vec<LongRunningPod>, String> {
    wait_for_recovery(|| {
        nodes_are_ready(cluster)?;
        processes_run(lab)?;
        let pods = objects(cluster, "pods")?;
        let mut now = all_long_running(&pods)?;
        read_volumes(cluster, &mut now)?;
        Ok(now)
    })
}

/// Fails if a volume that outlives its pod has lost content, although its pod may have been replaced meanwhile.
pub fn volumes_are_kept(before: &[LongRunningPod], now: &[LongRunningPod]) -> Result<(), String> {
    for was in before {
        let is = now.iter().find(|is| is.name == was.name);
        let kept = is.map_or(Ok(()), |is| volume_is_kept(was, is));
        kept.map_err(|(Transient(why) | Permanent(why))| why)?;
    }
    Ok(())
}

/// After a round: every pod is untouched, or was restarted by its policy, and nothing is lost or duplicated. Returns the pods that
/// run now.
pub fn check_round(
    lab: &Lab,
    cluster: &mut TestCluster,
    faults: &[Fault],
    round: usize,
    before: &[LongRunningPod],
    injected: &Injected,
) -> Result<Vec<LongRunningPod>, String> {
    wait_for_recovery(|| {
        nodes_are_ready(cluster)?;
        processes_run(lab)?;
        let pods = objects(cluster, "pods")?;
        let mut now = all_long_running(&pods)?;
        for (before, now) in before.iter().zip(&now) {
            compare(before, now, faults)?;
        }
        round_pods_exited(&pods, faults, round)?;
        deleted_pods_are_removed(lab, &pods, faults)?;
        job_is_complete(lab, cluster, &pods, faults, round, injected)?;
        check_pods(cluster, &mut now, before, faults, round)?;
        Ok(now)
    })
}

/// Repeats a check until it succeeds or reports a permanent deviation.
fn wait_for_recovery<T>(mut check: impl FnMut() -> Result<T, Deviation>) -> Result<T, String> {
    let deadline = Instant::now() + RECOVERY_TIMEOUT;
    loop {
        match check() {
            Ok(found) => return Ok(found),
            Err(Permanent(why)) => return Err(why),
            Err(Transient(why)) if Instant::now() >= deadline => {
                return Err(format!(
                    "after {} s still: {why}",
                    RECOVERY_TIMEOUT.as_secs()
                ));
            }
            Err(Transient(_)) => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

fn objects(cluster: &mut TestCluster, kind: &str) -> Result<Vec<Value>, Deviation> {
    let command = format!("kubectl get {kind} --request-timeout=20s --output=json");
    let (code, text) = cluster.try_shell(&command);
    let list: Option<Value> = serde_json::from_str(&text).ok().filter(|_| code == 0);
    let items = list.and_then(|mut list| match list["items"].take() {
        Value::Array(items) => Some(items),
        _ => None,
    });
    items.ok_or_else(|| Transient(format!("{command}: {text}")))
}

fn nodes_are_ready(cluster: &mut TestCluster) -> Result<(), Deviation> {
    let nodes = objects(cluster, "nodes")?;
    let is_ready = |node: &&Value| e2e::condition(node, "Ready").starts_with("True");
    let ready = nodes.iter().filter(is_ready).count();
    if ready == NODES.len() && nodes.len() == NODES.len() {
        Ok(())
    } else {
        Err(Transient(format!(
            "{ready} of {} nodes are Ready",
            nodes.len()
        )))
    }
}

/// Every node has one agent with its guard, one hub with its two processes, and one process for each container that runs during all rounds.
fn processes_run(lab: &Lab) -> Result<(), Deviation> {
    for node in NODES {
        let all = lab.processes(node);
        for (args, count) in [
            ("internal node", 2),
            ("internal hub", 1),
            ("internal hub-inside", 1),
        ] {
            let is_part = |process: &&Process| {
                process.args.ends_with(args) && !process.args.contains("srun ")
            };
            let parts = all.iter().filter(is_part);
            let parts: Vec<_> = parts.collect();
            if parts.len() != count {
                return Err(Transient(format!(
                    "{node}: expected {count} times {args:?}: {parts:?}"
                )));
            }
        }
        for mark in ["mark-steady-a", "mark-steady-b", "mark-keeper-c"] {
            let processes = marked(&all, mark);
            if processes.len() != 1 {
                return Err(Transient(format!(
                    "{node}: expected one {mark:?}: {processes:?}"
                )));
            }
        }
    }
    Ok(())
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn name(pod: &Value) -> &str {
    text(&pod["metadata"], "name")
}

/// All pods that run during all rounds, by node; each must be running and ready.
fn all_long_running(pods: &[Value]) -> Result<Vec<LongRunningPod>, Deviation> {
    let mut found = Vec::new();
    for node in NODES {
        for (prefix, target) in [("steady-", Target::Steady), ("keeper-", Target::Keeper)] {
            let is_wanted = |pod: &&Value| {
                name(pod).starts_with(prefix) && text(&pod["spec"], "nodeName") == node
            };
            let found_pods: Vec<_> = pods.iter().filter(is_wanted).collect();
            let [pod] = found_pods[..] else {
                let states = found_pods.iter().map(|pod| &pod["status"]);
                let states: Vec<_> = states.collect();
                return Err(Transient(format!(
                    "{node}: expected one pod {prefix}*: {states:?}"
                )));
            };
            found.push(long_running_pod(pod, node, target)?);
        }
    }
    Ok(found)
}

fn long_running_pod(
    pod: &Value,
    node: &'static str,
    target: Target,
) -> Result<LongRunningPod, Deviation> {
    let status = &pod["status"];
    let name = name(pod);
    match text(status, "phase") {
        "Running" => {}
        "Succeeded" | "Failed" => {
            return Err(Permanent(format!("{name} has terminated: {status}")));
        }
        _ => return Err(Transient(format!("{name} does not run: {status}"))),
    }
    let of_containers = status["containerStatuses"].as_array();
    let mut containers = Vec::new();
    for container in of_containers.into_iter().flatten() {
        let started = text(&container["state"]["running"], "startedAt");
        if started.is_empty() || container["ready"] != true {
            return Err(Transient(format!("{name}: not ready: {container}")));
        }
        containers.push(Container {
            name: text(container, "name").to_owned(),
            id: text(container, "containerID").to_owned(),
            started: started.to_owned(),
            restarts: container["restartCount"].as_u64().unwrap_or_default(),
            runs: 1,
        });
    }
    let wanted = if target == Target::Steady { 2 } else { 1 };
    if containers.len() != wanted || text(status, "podIP").is_empty() {
        return Err(Transient(format!("{name}: incomplete status: {status}")));
    }
    if !e2e::condition(pod, "Ready").starts_with("True") {
        return Err(Transient(format!("{name}: not Ready: {status}")));
    }
    Ok(LongRunningPod {
        name: name.to_owned(),
        node,
        target,
        uid: text(&pod["metadata"], "uid").to_owned(),
        address: text(status, "podIP").to_owned(),
        containers,
        volume: None,
    })
}

impl LongRunningPod {
    /// Whether one of its containers was ever restarted, so that the back-off would delay the next restart.
    pub fn was_restarted(&self) -> bool {
        self.containers.iter().any(|one| one.restarts > 0)
    }

    fn allowed(&self, faults: &[Fault], container: &Container) -> Restarts {
        let first = container.name == self.containers[0].name;
        model::restarts(faults, self.node, self.target, first)
    }
}

fn compare(
    before: &LongRunningPod,
    now: &LongRunningPod,
    faults: &[Fault],
) -> Result<(), Deviation> {
    let name = &before.name;
    if (&before.name, &before.uid) != (&now.name, &now.uid) {
        return Err(Permanent(format!("another pod: {before:?}, then {now:?}")));
    }
    let mut untouched = true;
    for (was, is) in before.containers.iter().zip(&now.containers) {
        let allowed = before.allowed(faults, was);
        let restarts = is.restarts.saturating_sub(was.restarts);
        untouched &= restarts == 0;
        if restarts > allowed.most {
            return Err(Permanent(format!(
                "{name}: {restarts} restarts of {}, at most {} explained by the faults: {now:?}",
                is.name, allowed.most
            )));
        }
        if restarts < allowed.least {
            return Err(Transient(format!("{name}: {} was not restarted", is.name)));
        }
        if restarts == 0 && (&was.id, &was.started) != (&is.id, &is.started) {
            return Err(Permanent(format!("{name}: {was:?}, then {is:?}")));
        }
    }
    if untouched && before.address != now.address {
        return Err(Permanent(format!(
            "{name}: its address was {}, then {}",
            before.address, now.address
        )));
    }
    Ok(())
}

/// Container restarts, and even the replacement of the pod, neither empty its volume nor truncate the sequence in it.
fn volume_is_kept(was: &LongRunningPod, is: &LongRunningPod) -> Result<(), Deviation> {
    let (Some(before), Some(now)) = (&was.volume, &is.volume) else {
        return Ok(());
    };
    if before.id == now.id && before.records <= now.records {
        return Ok(());
    }
    Err(Permanent(format!(
        "{}: the volume has lost content: {before:?}, then {now:?}",
        is.name
    )))
}

/// Pods with policy Never have exited with their own code, unless they were killed; and images were unpacked completely.
fn round_pods_exited(pods: &[Value], faults: &[Fault], round: usize) -> Result<(), Deviation> {
    for node in NODES {
        let own = exit_code(round);
        let codes: &[u64] = if model::may_fail(faults, node) {
            &[own, 137]
        } else {
            &[own]
        };
        exited_with(pods, &format!("ends-{round}-{node}"), codes)?;
    }
    for wanted in model::pulling_pods(faults) {
        exited_with(pods, &wanted, &[0])?;
    }
    Ok(())
}

/// Deleted pods have left no object and no process.
fn deleted_pods_are_removed(lab: &Lab, pods: &[Value], faults: &[Fault]) -> Result<(), Deviation> {
    let deleted = model::deleted_pods(faults);
    if let Some(pod) = pods
        .iter()
        .find(|pod| deleted.iter().any(|deleted| name(pod) == deleted))
    {
        return Err(Transient(format!(
            "{} still exists: {}",
            name(pod),
            pod["status"]
        )));
    }
    for node in NODES.iter().filter(|_| !deleted.is_empty()) {
        let all = lab.processes(node);
        let left = marked(&all, Target::Deleted.mark());
        if !left.is_empty() {
            return Err(Transient(format!(
                "{node}: processes of a deleted pod: {left:?}"
            )));
        }
    }
    Ok(())
}

fn exited_with(pods: &[Value], wanted: &str, codes: &[u64]) -> Result<(), Deviation> {
    let pod = pods.iter().find(|pod| name(pod) == wanted);
    let pod = pod.ok_or_else(|| Permanent(format!("there is no pod {wanted}")))?;
    let status = &pod["status"];
    if !["Succeeded", "Failed"].contains(&text(status, "phase")) {
        return Err(Transient(format!("{wanted} has not terminated: {status}")));
    }
    let container = &status["containerStatuses"][0];
    let code = container["state"]["terminated"]["exitCode"].as_u64();
    if code.is_some_and(|code| codes.contains(&code)) && container["restartCount"] == 0 {
        Ok(())
    } else {
        Err(Permanent(format!(
            "{wanted} should have exited with {codes:?}: {status}"
        )))
    }
}

/// Every index was completed once, by a pod that the API server knows, and every failed pod had been killed.
fn job_is_complete(
    lab: &Lab,
    cluster: &mut TestCluster,
    pods: &[Value],
    faults: &[Fault],
    round: usize,
    injected: &Injected,
) -> Result<(), Deviation> {
    let job_name = format!("work-{round}");
    let job_pods: Vec<_> = pods
        .iter()
        .filter(|pod| name(pod).starts_with(&format!("{job_name}-")))
        .collect();
    for pod in &job_pods {
        let uid = text(&pod["metadata"], "uid").to_owned();
        let node = text(&pod["spec"], "nodeName");
        let explained = injected.killed_work.contains(&uid) || model::work_may_fail(faults, node);
        if text(&pod["status"], "phase") == "Failed" && !explained {
            return Err(Permanent(format!(
                "{} failed, and no fault explains it: {}",
                name(pod),
                pod["status"]
            )));
        }
    }
    let jobs = objects(cluster, "jobs")?;
    let job = jobs.iter().find(|job| name(job) == job_name);
    let job = job.ok_or_else(|| Permanent(format!("there is no Job {job_name}")))?;
    if !e2e::condition(job, "Complete").starts_with("True") {
        return Err(Transient(format!(
            "{job_name}: not complete: {}",
            job["status"]
        )));
    }
    // Read after the Job, which may have been completed since the pods were read.
    let pods = objects(cluster, "pods")?;
    let job_pods: Vec<_> = pods
        .iter()
        .filter(|pod| name(pod).starts_with(&format!("{job_name}-")))
        .collect();
    let count_in = |phase: &str| {
        let pods = job_pods.iter();
        pods.filter(|pod| text(&pod["status"], "phase") == phase)
            .count()
    };
    let counted = |field: &str| job["status"][field].as_u64().unwrap_or_default() as usize;
    let counts = (count_in("Succeeded"), count_in("Failed"));
    if counts != (counted("succeeded"), counted("failed")) || counts.0 != COMPLETIONS {
        return Err(Permanent(format!(
            "{job_name}: {counts:?} pods succeeded and failed, the Job's status is {}",
            job["status"]
        )));
    }
    let records = lab.sh(&format!("cat {DIR}/{job_name}")).run().stdout;
    for record in records.lines() {
        let uid = record.split(' ').nth(1).unwrap_or_default();
        if !job_pods
            .iter()
            .any(|pod| text(&pod["metadata"], "uid") == uid)
        {
            return Err(Permanent(format!(
                "{job_name}: no pod has this record: {record}"
            )));
        }
    }
    for pod in job_pods {
        let index = text(
            &pod["metadata"]["annotations"],
            "batch.kubernetes.io/job-completion-index",
        );
        let uid = text(&pod["metadata"], "uid");
        let count = |event: &str| {
            let record = format!("{index} {uid} {event}");
            records.lines().filter(|line| **line == record).count()
        };
        let found = (count("start"), count("done"));
        let right = match text(&pod["status"], "phase") {
            "Succeeded" => found == (1, 1),
            _ => found.0 <= 1 && found.1 <= found.0,
        };
        if !right {
            return Err(Permanent(format!(
                "{}: started and completed {found:?} times: {}\n{records}",
                name(pod),
                pod["status"]
            )));
        }
    }
    Ok(())
}

/// Checks in the pods themselves: their files, their network, their logs.
fn check_pods(
    cluster: &mut TestCluster,
    now: &mut [LongRunningPod],
    before: &[LongRunningPod],
    faults: &[Fault],
    round: usize,
) -> Result<(), Deviation> {
    let outputs = run_all(cluster, &commands(now, round))?;
    let output_of = |key: &str| outputs.get(key).map_or("", String::as_str);
    for (pod, was) in now.iter_mut().zip(before) {
        let records = parse_records(output_of(&pod.name), pod)?;
        pod.volume = records.volume;
        volume_is_kept(was, pod)?;
        let counts = records.runs.iter();
        for (index, (count, container)) in counts.zip(&mut pod.containers).enumerate() {
            container.runs = *count;
            let restarts = container.restarts - was.containers[index].restarts;
            let Some(runs) = container.runs.checked_sub(was.containers[index].runs) else {
                return Err(Permanent(format!(
                    "{}: the volume has lost runs of {}",
                    pod.name, container.name
                )));
            };
            // A run that is killed at once leaves no line.
            if runs > restarts || (restarts == 1 && runs == 0) {
                return Err(Permanent(format!(
                    "{}: {restarts} restarts of {}, but {runs} more runs",
                    pod.name, container.name
                )));
            }
        }
        if pod.target == Target::Steady {
            for container in &pod.containers {
                let key = format!("{} {}", pod.name, container.name);
                ticks_are_complete(&key, output_of(&key))?;
            }
        }
    }
    for node in NODES {
        let key = format!("ends-{round}-{node}");
        let log = output_of(&key);
        let may_lack = model::may_fail(faults, node) || model::disk_was_full(faults, node);
        if log != "started\nexiting" && !may_lack {
            return Err(Transient(format!("log of {key}: {log:?}")));
        }
    }
    Ok(())
}

/// Reads the content of the volumes that outlive their pods.
fn read_volumes(cluster: &mut TestCluster, pods: &mut [LongRunningPod]) -> Result<(), Deviation> {
    let keepers = pods.iter().filter(|pod| pod.target == Target::Keeper);
    let commands: Vec<_> = keepers.map(|pod| exec(pod, &keeper_script(pod))).collect();
    let outputs = run_all(cluster, &commands)?;
    for pod in pods.iter_mut() {
        if let Some(output) = outputs.get(&pod.name) {
            pod.volume = parse_records(output, pod)?.volume;
        }
    }
    Ok(())
}

/// The content of a pod's files.
#[derive(Debug, PartialEq)]
struct PodRecords {
    /// The number of runs of each container, if the pod counts them.
    runs: Vec<u64>,
    volume: Option<VolumeContent>,
}

/// Parses the output of a pod's script. It must have no other fields: a missing address, network or file adds some.
fn parse_records(output: &str, pod: &LongRunningPod) -> Result<PodRecords, Deviation> {
    let fields: Vec<&str> = output.split_whitespace().collect();
    let parse = || {
        let (&"complete", fields) = fields.split_last()? else {
            return None;
        };
        if pod.target == Target::Keeper {
            let [id, records] = fields else { return None };
            let volume = VolumeContent {
                id: (*id).to_owned(),
                records: records.parse().ok()?,
            };
            return Some(PodRecords {
                runs: Vec::new(),
                volume: Some(volume),
            });
        }
        let runs: Vec<u64> = fields
            .iter()
            .map(|count| count.parse().ok())
            .collect::<Option<_>>()?;
        (runs.len() == pod.containers.len()).then_some(PodRecords { runs, volume: None })
    };
    parse().ok_or_else(|| Transient(format!("{}: {output}", pod.name)))
}

/// Checks a keeper's address and sequence; prints the id and the length of the sequence.
fn keeper_script(pod: &LongRunningPod) -> String {
    format!(
        "{}; awk \"{{ if (\\$1 + 0 != NR) {{ print \\\"line \\\" NR \\\" is \\\" \\$1; exit 1 }} }}\" /data/seq && \
         cat /data/id && cat /data/seq | wc -l && echo complete",
        check_address(pod)
    )
}

fn check_address(pod: &LongRunningPod) -> String {
    let address = &pod.address;
    format!("ip -4 -o addr | grep -q \"inet {address}/\" || echo no address")
}

/// A command by name: runs a script in the first container of a pod.
fn exec(pod: &LongRunningPod, script: &str) -> (String, String) {
    let quoted = script.replace('\'', r"'\''");
    let (name, container) = (&pod.name, &pod.containers[0].name);
    let command = format!("kubectl exec {name} --container={container} -- sh -c '{quoted}'");
    (name.clone(), command)
}

/// Commands by name. The output of those in long-running pods ends with `complete` if all checks pass.
fn commands(pods: &[LongRunningPod], round: usize) -> Vec<(String, String)> {
    let mut commands = Vec::new();
    for pod in pods {
        let neighbour = pods
            .iter()
            .find(|other| (other.node, other.target) == (pod.node, Target::Keeper));
        let script = match (pod.target, neighbour) {
            (Target::Steady, Some(neighbour)) => format!(
                "{}; printf \"GET /passwd HTTP/1.0\\r\\n\\r\\n\" | nc -w 5 {} 8080 | grep -q ^root || echo no network; \
                 cat /data/a.runs | wc -l; cat /data/b.runs | wc -l; echo complete",
                check_address(pod),
                neighbour.address
            ),
            _ => keeper_script(pod),
        };
        commands.push(exec(pod, &script));
        if pod.target == Target::Steady {
            for container in &pod.containers {
                commands.push((
                    format!("{} {}", pod.name, container.name),
                    format!("kubectl logs {} --container={}", pod.name, container.name),
                ));
            }
        }
    }
    for node in NODES {
        let name = format!("ends-{round}-{node}");
        commands.push((name.clone(), format!("kubectl logs {name}")));
    }
    commands
}

/// Runs commands in parallel; returns the stdout and stderr of each.
fn run_all(
    cluster: &mut TestCluster,
    commands: &[(String, String)],
) -> Result<BTreeMap<String, String>, Deviation> {
    let mut script =
        format!("rm -rf {DIR}/outputs; mkdir {DIR}/outputs && cd {DIR}/outputs || exit 1\n");
    for (number, (_, command)) in commands.iter().enumerate() {
        script += &format!("timeout 40 {command} > {number} 2>&1 &\n");
    }
    script += "wait\n";
    for number in 0..commands.len() {
        script += &format!("cat {number}; echo; echo ---END OF OUTPUT---\n");
    }
    let (code, text) = cluster.try_shell(&script);
    let outputs: Vec<_> = text.split("---END OF OUTPUT---").collect();
    if code != 0 || outputs.len() < commands.len() {
        return Err(Transient(format!("cannot run the commands: {text}")));
    }
    let pairs = commands.iter().zip(outputs);
    Ok(pairs
        .map(|((name, _), output)| (name.clone(), output.trim().to_owned()))
        .collect())
}

/// Checks for `tick 1`, `tick 2`, … without a gap, unless the log itself reports a loss.
fn ticks_are_complete(name: &str, log: &str) -> Result<(), Deviation> {
    let mut last = 0;
    let mut lost = false;
    for line in log.lines() {
        if line.starts_with("coracle: ") && line.contains("of this log were lost") {
            lost = true;
            continue;
        }
        let tick: u64 = line
            .strip_prefix("tick ")
            .and_then(|number| number.parse().ok())
            .ok_or_else(|| Transient(format!("log of {name}: {line:?}")))?;
        if tick != last + 1 && !(lost && tick > last) {
            return Err(Permanent(format!(
                "log of {name}: tick {last}, then {tick}"
            )));
        }
        lost = false;
        last = tick;
    }
    if last == 0 {
        return Err(Transient(format!("log of {name} is empty")));
    }
    Ok(())
}

#[cfg(test)]
fn test_pod(target: Target, containers: &[&str]) -> LongRunningPod {
    let container = |name: &&str| Container {
        name: (*name).to_owned(),
        id: String::new(),
        started: String::new(),
        restarts: 0,
        runs: 1,
    };
    LongRunningPod {
        name: format!("{target:?}"),
        node: "node1",
        target,
        uid: String::new(),
        address: String::new(),
        containers: containers.iter().map(container).collect(),
        volume: None,
    }
}

#[test]
fn records_are_accepted_only_without_other_fields() {
    let parsed = |output: &str, pod: &LongRunningPod| parse_records(output, pod).ok();
    let steady = test_pod(Target::Steady, &["a", "b"]);
    let runs = parsed("1 2 complete", &steady).map(|records| records.runs);
    assert_eq!(runs, Some(vec![1, 2]));
    for output in [
        "",
        "1 2",
        "1 complete",
        "no address 1 2 complete",
        "no network 1 2 complete",
        "cat: can't open '/data/a.runs' 0 2 complete",
    ] {
        assert_eq!(parsed(output, &steady), None, "{output}");
    }
    let keeper = test_pod(Target::Keeper, &["a"]);
    let volume = VolumeContent {
        id: "f00d".to_owned(),
        records: 12,
    };
    let records = parsed("f00d\n12\ncomplete", &keeper);
    assert_eq!(records.and_then(|records| records.volume), Some(volume));
    for output in [
        "complete",
        "12 complete",
        "no address complete",
        "no address f00d 12 complete",
        "line 3 is 5",
        "cat: can't open '/data/id': No such file or directory",
    ] {
        assert_eq!(parsed(output, &keeper), None, "{output}");
    }
}

/// A container that restarts in an emptied volume begins a new sequence, which is complete and may be longer than the old one.
#[test]
fn emptied_volume_is_noticed_after_a_restart() {
    let keeper = |id: &str, records: u64| LongRunningPod {
        volume: Some(VolumeContent {
            id: id.to_owned(),
            records,
        }),
        ..test_pod(Target::Keeper, &["c"])
    };
    let before = [test_pod(Target::Steady, &["a", "b"]), keeper("f00d", 12)];
    let after = |is: LongRunningPod| volumes_are_kept(&before, &[before[0].clone(), is]);
    assert_eq!(after(keeper("f00d", 12)), Ok(()));
    assert_eq!(after(keeper("f00d", 40)), Ok(()));
    after(keeper("beef", 40)).unwrap_err();
    after(keeper("f00d", 3)).unwrap_err();
}
