//! Polls the cluster after a round until its state is the one that the model allows, or until a time-out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use e2e::{Cluster, Lab, Process};
use serde_json::Value;

use crate::fault::{Fault, NODES, Target};
use crate::inject::{Injected, marked};
use crate::model::{self, Restarts};
use crate::workload::{COMPLETIONS, DIR, exit_code};

/// Time in which the cluster must recover.
const HEAL_TIMEOUT: Duration = Duration::from_secs(150);
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// A pod that runs during all rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    pub name: String,
    pub node: &'static str,
    pub target: Target,
    uid: String,
    address: String,
    containers: Vec<Container>,
}

#[derive(Debug, Clone, PartialEq)]
struct Container {
    name: String,
    id: String,
    started: String,
    restarts: u64,
    /// How many runs have written their line to the pod's emptyDir.
    runs: u64,
}

/// A deviation from the expected state.
#[derive(Debug)]
enum Wrong {
    /// The cluster may still recover.
    Yet(String),
    /// The cluster can't recover.
    Forever(String),
}

use Wrong::{Forever, Yet};

/// The pods that run before a round.
pub fn standing(lab: &Lab, cluster: &mut Cluster) -> Result<Vec<Standing>, String> {
    heal(|| {
        nodes_are_ready(cluster)?;
        parts_are_there(lab)?;
        let pods = objects(cluster, "pods")?;
        all_standing(&pods)
    })
}

/// After a round: every pod is untouched, or was restarted by its policy, and nothing is lost or duplicated. Returns the pods that
/// run now.
pub fn after(
    lab: &Lab,
    cluster: &mut Cluster,
    faults: &[Fault],
    round: usize,
    before: &[Standing],
    injected: &Injected,
) -> Result<Vec<Standing>, String> {
    heal(|| {
        nodes_are_ready(cluster)?;
        parts_are_there(lab)?;
        let pods = objects(cluster, "pods")?;
        let mut now = all_standing(&pods)?;
        for (before, now) in before.iter().zip(&now) {
            compare(before, now, faults)?;
        }
        rounds_pods(&pods, faults, round)?;
        deleted_are_gone(lab, &pods, faults)?;
        job_is_complete(lab, cluster, &pods, faults, round, injected)?;
        ask_pods(cluster, &mut now, before, faults, round)?;
        Ok(now)
    })
}

/// Repeats a check until it succeeds.
fn heal<T>(mut look: impl FnMut() -> Result<T, Wrong>) -> Result<T, String> {
    let end = Instant::now() + HEAL_TIMEOUT;
    loop {
        match look() {
            Ok(found) => return Ok(found),
            Err(Forever(why)) => return Err(why),
            Err(Yet(why)) if Instant::now() >= end => {
                return Err(format!("after {} s still: {why}", HEAL_TIMEOUT.as_secs()));
            }
            Err(Yet(_)) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

fn objects(cluster: &mut Cluster, kind: &str) -> Result<Vec<Value>, Wrong> {
    let command = format!("kubectl get {kind} --request-timeout=20s --output=json");
    let (code, text) = cluster.try_ask(&command);
    let list: Option<Value> = serde_json::from_str(&text).ok().filter(|_| code == 0);
    let items = list.and_then(|mut list| match list["items"].take() {
        Value::Array(items) => Some(items),
        _ => None,
    });
    items.ok_or_else(|| Yet(format!("{command}: {text}")))
}

fn nodes_are_ready(cluster: &mut Cluster) -> Result<(), Wrong> {
    let nodes = objects(cluster, "nodes")?;
    let is_ready = |node: &&Value| e2e::condition(node, "Ready").starts_with("True");
    let ready = nodes.iter().filter(is_ready).count();
    if ready == NODES.len() && nodes.len() == NODES.len() {
        Ok(())
    } else {
        Err(Yet(format!("{ready} of {} nodes are Ready", nodes.len())))
    }
}

/// Every node has one agent and one hub, each with its guard, and one process for each container that runs during all rounds.
fn parts_are_there(lab: &Lab) -> Result<(), Wrong> {
    for node in NODES {
        let all = lab.processes(node);
        for (words, count) in [("internal node", 2), ("internal hub", 2)] {
            let is_part = |process: &&Process| {
                process.args.contains(words) && !process.args.contains("srun ")
            };
            let parts = all.iter().filter(is_part);
            let parts: Vec<_> = parts.collect();
            if parts.len() != count {
                return Err(Yet(format!("{node}: {count} times {words:?}: {parts:?}")));
            }
        }
        for mark in ["mark-steady-a", "mark-steady-b", "mark-keeper-c"] {
            let processes = marked(&all, mark);
            if processes.len() != 1 {
                return Err(Yet(format!("{node}: one of {mark:?}: {processes:?}")));
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
fn all_standing(pods: &[Value]) -> Result<Vec<Standing>, Wrong> {
    let mut found = Vec::new();
    for node in NODES {
        for (prefix, target) in [("steady-", Target::Steady), ("keeper-", Target::Keeper)] {
            let there = |pod: &&Value| {
                name(pod).starts_with(prefix) && text(&pod["spec"], "nodeName") == node
            };
            let theirs: Vec<_> = pods.iter().filter(there).collect();
            let [pod] = theirs[..] else {
                let states = theirs.iter().map(|pod| &pod["status"]);
                let states: Vec<_> = states.collect();
                return Err(Yet(format!("{node}: one pod {prefix}*: {states:?}")));
            };
            found.push(standing_pod(pod, node, target)?);
        }
    }
    Ok(found)
}

fn standing_pod(pod: &Value, node: &'static str, target: Target) -> Result<Standing, Wrong> {
    let status = &pod["status"];
    let name = name(pod);
    match text(status, "phase") {
        "Running" => {}
        "Succeeded" | "Failed" => return Err(Forever(format!("{name} has ended: {status}"))),
        _ => return Err(Yet(format!("{name} doesn't run: {status}"))),
    }
    let of_containers = status["containerStatuses"].as_array();
    let mut containers = Vec::new();
    for container in of_containers.into_iter().flatten() {
        let started = text(&container["state"]["running"], "startedAt");
        if started.is_empty() || container["ready"] != true {
            return Err(Yet(format!("{name}: not ready: {container}")));
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
        return Err(Yet(format!("{name}: not all told: {status}")));
    }
    if !e2e::condition(pod, "Ready").starts_with("True") {
        return Err(Yet(format!("{name}: not Ready: {status}")));
    }
    Ok(Standing {
        name: name.to_owned(),
        node,
        target,
        uid: text(&pod["metadata"], "uid").to_owned(),
        address: text(status, "podIP").to_owned(),
        containers,
    })
}

impl Standing {
    /// Whether one of its containers was ever restarted, so that the back-off would delay the next restart.
    pub fn was_restarted(&self) -> bool {
        self.containers.iter().any(|one| one.restarts > 0)
    }

    fn allowed(&self, faults: &[Fault], container: &Container) -> Restarts {
        let first = container.name == self.containers[0].name;
        model::restarts(faults, self.node, self.target, first)
    }
}

fn compare(before: &Standing, now: &Standing, faults: &[Fault]) -> Result<(), Wrong> {
    let name = &before.name;
    if (&before.name, &before.uid) != (&now.name, &now.uid) {
        return Err(Forever(format!("another pod: {before:?}, then {now:?}")));
    }
    let mut untouched = true;
    for (was, is) in before.containers.iter().zip(&now.containers) {
        let allowed = before.allowed(faults, was);
        let restarts = is.restarts.saturating_sub(was.restarts);
        untouched &= restarts == 0;
        if restarts > allowed.most {
            return Err(Forever(format!(
                "{name}: {restarts} restarts of {}, at most {} explained by the faults: {now:?}",
                is.name, allowed.most
            )));
        }
        if restarts < allowed.least {
            return Err(Yet(format!("{name}: {} was not restarted", is.name)));
        }
        if restarts == 0 && (&was.id, &was.started) != (&is.id, &is.started) {
            return Err(Forever(format!("{name}: {was:?}, then {is:?}")));
        }
    }
    if untouched && before.address != now.address {
        return Err(Forever(format!(
            "{name}: its address was {}, then {}",
            before.address, now.address
        )));
    }
    Ok(())
}

/// Pods with policy Never have exited with their own code, unless they were killed; and images were unpacked completely.
fn rounds_pods(pods: &[Value], faults: &[Fault], round: usize) -> Result<(), Wrong> {
    for node in NODES {
        let own = exit_code(round);
        let codes: &[u64] = if model::may_fail(faults, node) {
            &[own, 137]
        } else {
            &[own]
        };
        ended_with(pods, &format!("ends-{round}-{node}"), codes)?;
    }
    for wanted in model::pulls(faults) {
        ended_with(pods, &wanted, &[0])?;
    }
    Ok(())
}

/// Deleted pods have left no object and no process.
fn deleted_are_gone(lab: &Lab, pods: &[Value], faults: &[Fault]) -> Result<(), Wrong> {
    let deleted = model::deleted(faults);
    if let Some(pod) = pods
        .iter()
        .find(|pod| deleted.iter().any(|gone| name(pod) == gone))
    {
        return Err(Yet(format!(
            "{} is still there: {}",
            name(pod),
            pod["status"]
        )));
    }
    for node in NODES.iter().filter(|_| !deleted.is_empty()) {
        let all = lab.processes(node);
        let left = marked(&all, Target::Deleted.mark());
        if !left.is_empty() {
            return Err(Yet(format!("{node}: of a deleted pod: {left:?}")));
        }
    }
    Ok(())
}

fn ended_with(pods: &[Value], wanted: &str, codes: &[u64]) -> Result<(), Wrong> {
    let pod = pods.iter().find(|pod| name(pod) == wanted);
    let pod = pod.ok_or_else(|| Forever(format!("there is no pod {wanted}")))?;
    let status = &pod["status"];
    if !["Succeeded", "Failed"].contains(&text(status, "phase")) {
        return Err(Yet(format!("{wanted} has not ended: {status}")));
    }
    let container = &status["containerStatuses"][0];
    let code = container["state"]["terminated"]["exitCode"].as_u64();
    if code.is_some_and(|code| codes.contains(&code)) && container["restartCount"] == 0 {
        Ok(())
    } else {
        Err(Forever(format!(
            "{wanted} should have ended with {codes:?}: {status}"
        )))
    }
}

/// Every index was completed once, by a pod that the API server knows, and every failed pod had been killed.
fn job_is_complete(
    lab: &Lab,
    cluster: &mut Cluster,
    pods: &[Value],
    faults: &[Fault],
    round: usize,
    injected: &Injected,
) -> Result<(), Wrong> {
    let job_name = format!("work-{round}");
    let theirs: Vec<_> = pods
        .iter()
        .filter(|pod| name(pod).starts_with(&format!("{job_name}-")))
        .collect();
    for pod in &theirs {
        let uid = text(&pod["metadata"], "uid").to_owned();
        let node = text(&pod["spec"], "nodeName");
        let explained = injected.killed_work.contains(&uid) || model::work_may_fail(faults, node);
        if text(&pod["status"], "phase") == "Failed" && !explained {
            return Err(Forever(format!(
                "{} failed, and no fault explains it: {}",
                name(pod),
                pod["status"]
            )));
        }
    }
    let jobs = objects(cluster, "jobs")?;
    let job = jobs.iter().find(|job| name(job) == job_name);
    let job = job.ok_or_else(|| Forever(format!("there is no Job {job_name}")))?;
    if !e2e::condition(job, "Complete").starts_with("True") {
        return Err(Yet(format!("{job_name}: not complete: {}", job["status"])));
    }
    let in_phase = |phase: &str| {
        let pods = theirs.iter();
        pods.filter(|pod| text(&pod["status"], "phase") == phase)
            .count()
    };
    let counted = |field: &str| job["status"][field].as_u64().unwrap_or_default() as usize;
    let counts = (in_phase("Succeeded"), in_phase("Failed"));
    if counts != (counted("succeeded"), counted("failed")) || counts.0 != COMPLETIONS {
        return Err(Forever(format!(
            "{job_name}: {counts:?} pods succeeded and failed, the Job says {}",
            job["status"]
        )));
    }
    let records = lab.sh(&format!("cat {DIR}/{job_name}")).run().stdout;
    for record in records.lines() {
        let uid = record.split(' ').nth(1).unwrap_or_default();
        if !theirs
            .iter()
            .any(|pod| text(&pod["metadata"], "uid") == uid)
        {
            return Err(Forever(format!("{job_name}: record of no pod: {record}")));
        }
    }
    for pod in theirs {
        let index = text(
            &pod["metadata"]["annotations"],
            "batch.kubernetes.io/job-completion-index",
        );
        let uid = text(&pod["metadata"], "uid");
        let count = |word: &str| {
            let record = format!("{index} {uid} {word}");
            records.lines().filter(|line| **line == record).count()
        };
        let found = (count("start"), count("done"));
        let right = match text(&pod["status"], "phase") {
            "Succeeded" => found == (1, 1),
            _ => found.0 <= 1 && found.1 <= found.0,
        };
        if !right {
            return Err(Forever(format!(
                "{}: began and ended {found:?} times: {}\n{records}",
                name(pod),
                pod["status"]
            )));
        }
    }
    Ok(())
}

/// Checks in the pods themselves: their files, their network, their logs.
fn ask_pods(
    cluster: &mut Cluster,
    now: &mut [Standing],
    before: &[Standing],
    faults: &[Fault],
    round: usize,
) -> Result<(), Wrong> {
    let answers = ask_all(cluster, &questions(now, round))?;
    let answer = |key: &str| answers.get(key).map_or("", String::as_str);
    for (pod, was) in now.iter_mut().zip(before) {
        let said = answer(&pod.name);
        let words: Vec<&str> = said.split_whitespace().collect();
        let Some(counts) = parse_counts(&words, pod) else {
            return Err(Yet(format!("{}: {said}", pod.name)));
        };
        for (index, (count, container)) in counts.iter().zip(&mut pod.containers).enumerate() {
            container.runs = *count;
            let restarts = container.restarts - was.containers[index].restarts;
            let Some(runs) = container.runs.checked_sub(was.containers[index].runs) else {
                return Err(Forever(format!(
                    "{}: the volume has lost runs of {}",
                    pod.name, container.name
                )));
            };
            // A run that is killed at once leaves no line.
            if runs > restarts || (restarts == 1 && runs == 0) {
                return Err(Forever(format!(
                    "{}: {restarts} restarts of {}, but {runs} more runs",
                    pod.name, container.name
                )));
            }
        }
        if pod.target == Target::Steady {
            for container in &pod.containers {
                let key = format!("{} {}", pod.name, container.name);
                ticks_are_whole(&key, answer(&key))?;
            }
        }
    }
    for node in NODES {
        let key = format!("ends-{round}-{node}");
        let log = answer(&key);
        let may_lack = model::may_fail(faults, node) || model::disk_was_full(faults, node);
        if log != "began\ngone" && !may_lack {
            return Err(Yet(format!("log of {key}: {log:?}")));
        }
    }
    Ok(())
}

/// The number of runs of each container, if the pod's answer says nothing else: a missing address, network or file adds words.
fn parse_counts(words: &[&str], pod: &Standing) -> Option<Vec<u64>> {
    let (&"whole", counts) = words.split_last()? else {
        return None;
    };
    let expected = match pod.target {
        Target::Steady => pod.containers.len(),
        _ => 0,
    };
    let counts: Vec<u64> = counts
        .iter()
        .map(|count| count.parse().ok())
        .collect::<Option<_>>()?;
    (counts.len() == expected).then_some(counts)
}

/// Commands by names. Those to standing pods end with the word `whole` if all is well.
fn questions(pods: &[Standing], round: usize) -> Vec<(String, String)> {
    let mut questions = Vec::new();
    for pod in pods {
        let has_address = format!("ip -4 -o addr | grep -q \"inet {}/\"", pod.address);
        let neighbour = pods
            .iter()
            .find(|other| (other.node, other.target) == (pod.node, Target::Keeper));
        let script = match (pod.target, neighbour) {
            (Target::Steady, Some(neighbour)) => format!(
                "{has_address} || echo no address; printf \"GET /passwd HTTP/1.0\\r\\n\\r\\n\" | nc -w 5 {} 8080 | grep -q ^root || echo no network; \
                 cat /data/a.runs | wc -l; cat /data/b.runs | wc -l; echo whole",
                neighbour.address
            ),
            _ => format!(
                "{has_address} || echo no address; awk \"{{ if (\\$1 + 0 != NR) {{ print \\\"line \\\" NR \\\" is \\\" \\$1; exit 1 }} }}\" /data/seq && echo whole"
            ),
        };
        let quoted = script.replace('\'', r"'\''");
        let container = &pod.containers[0].name;
        questions.push((
            pod.name.clone(),
            format!(
                "kubectl exec {} --container={container} -- sh -c '{quoted}'",
                pod.name
            ),
        ));
        if pod.target == Target::Steady {
            for container in &pod.containers {
                questions.push((
                    format!("{} {}", pod.name, container.name),
                    format!("kubectl logs {} --container={}", pod.name, container.name),
                ));
            }
        }
    }
    for node in NODES {
        let name = format!("ends-{round}-{node}");
        questions.push((name.clone(), format!("kubectl logs {name}")));
    }
    questions
}

/// Runs commands in parallel; returns the stdout and stderr of each.
fn ask_all(
    cluster: &mut Cluster,
    questions: &[(String, String)],
) -> Result<BTreeMap<String, String>, Wrong> {
    let mut script =
        format!("rm -rf {DIR}/answers; mkdir {DIR}/answers && cd {DIR}/answers || exit 1\n");
    for (number, (_, command)) in questions.iter().enumerate() {
        script += &format!("timeout 40 {command} > {number} 2>&1 &\n");
    }
    script += "wait\n";
    for number in 0..questions.len() {
        script += &format!("cat {number}; echo; echo ---END OF ANSWER---\n");
    }
    let (code, text) = cluster.try_ask(&script);
    let answers: Vec<_> = text.split("---END OF ANSWER---").collect();
    if code != 0 || answers.len() < questions.len() {
        return Err(Yet(format!("cannot ask: {text}")));
    }
    let pairs = questions.iter().zip(answers);
    Ok(pairs
        .map(|((name, _), answer)| (name.clone(), answer.trim().to_owned()))
        .collect())
}

/// Checks for `tick 1`, `tick 2`, … without a gap, unless the log itself notes a loss.
fn ticks_are_whole(name: &str, log: &str) -> Result<(), Wrong> {
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
            .ok_or_else(|| Yet(format!("log of {name}: {line:?}")))?;
        if tick != last + 1 && !(lost && tick > last) {
            return Err(Forever(format!("log of {name}: tick {last}, then {tick}")));
        }
        lost = false;
        last = tick;
    }
    if last == 0 {
        return Err(Yet(format!("log of {name} is empty")));
    }
    Ok(())
}

#[test]
fn counts_are_accepted_only_without_other_words() {
    let container = |name: &str| Container {
        name: name.to_owned(),
        id: String::new(),
        started: String::new(),
        restarts: 0,
        runs: 1,
    };
    let pod = |target, containers: &[&str]| Standing {
        name: "pod".to_owned(),
        node: "node1",
        target,
        uid: String::new(),
        address: String::new(),
        containers: containers.iter().map(|name| container(name)).collect(),
    };
    let parsed = |answer: &str, pod: &Standing| {
        parse_counts(&answer.split_whitespace().collect::<Vec<_>>(), pod)
    };
    let steady = pod(Target::Steady, &["a", "b"]);
    assert_eq!(parsed("1 2 whole", &steady), Some(vec![1, 2]));
    for answer in [
        "",
        "1 2",
        "1 whole",
        "no address 1 2 whole",
        "no network 1 2 whole",
        "cat: can't open '/data/a.runs' 0 2 whole",
    ] {
        assert_eq!(parsed(answer, &steady), None, "{answer}");
    }
    let keeper = pod(Target::Keeper, &["a"]);
    assert_eq!(parsed("whole", &keeper), Some(Vec::new()));
    assert_eq!(parsed("no address whole", &keeper), None);
}
