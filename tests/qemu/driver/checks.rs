//! What is tried.

use std::time::{Duration, Instant};

use linux::cgroup::Group;
use serde_json::{Value, json};

use crate::Seen;
use crate::node::{Node, Way};

/// Takes all the memory that there is, as a child of the container's first process.
const EAT: &str = "tail /dev/zero; code=$?; echo survived; exit $code";
const SLEEP: &str = "exec sleep 1000";

fn container(name: &str, script: &str, resources: Value) -> Value {
    json!({"name": name, "image": "coracle.test/busybox:1", "imagePullPolicy": "Never", "command": ["sh", "-c", script],
        "resources": resources})
}

fn pod(containers: Value) -> Value {
    json!({"restartPolicy": "Never", "containers": containers})
}

fn memory_limit(bytes: &str) -> Value {
    json!({"limits": {"memory": bytes}})
}

fn must(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

fn file(group: &Group, name: &str) -> String {
    let text = std::fs::read_to_string(group.path().join(name)).unwrap_or_default();
    text.trim().to_owned()
}

/// A container that wants more than its limit is killed, as a whole, and its sibling lives.
pub async fn memory(node: &Node) -> Seen {
    let containers = json!([
        container("sibling", SLEEP, memory_limit("16Mi")),
        container("eater", EAT, memory_limit("32Mi")),
    ]);
    let mut pod = node.run("memory", pod(containers), Way::Grouped).await?;
    pod.running("sibling").await?;
    must(file(&pod.group, "memory.max") == "50331648", || {
        format!("the pod's limit is {}", file(&pod.group, "memory.max"))
    })?;
    let end = pod.ended("eater").await?;
    must(end == ("OOMKilled".to_owned(), 137), || {
        format!("it ended with {end:?}")
    })?;
    let log = pod.log("eater").await?;
    must(!log.contains("survived"), || {
        "its first process lived on".to_owned()
    })?;
    must(pod.still_runs("sibling").await?, || {
        "its sibling died".to_owned()
    })?;
    let sibling = pod.group.below("sibling-0");
    must(sibling.oom_kills() == Some(0), || {
        format!("{:?}", sibling.oom_kills())
    })?;
    let usage = sibling.usage().map_err(|error| error.to_string())?;
    must(
        usage.working_set > 0 && usage.processes == 1 && usage.cpu_ns > 0,
        || format!("{usage:?}"),
    )?;
    pod.end().await?;
    Ok(format!(
        "{end:?}, the sibling uses {} bytes",
        usage.working_set
    ))
}

/// A container sees its own group as the root, can't change it, and commands in it belong to it.
pub async fn view(node: &Node) -> Seen {
    let script = "cat /proc/self/cgroup; cd /sys/fs/cgroup; cat memory.max cpu.max cpu.weight; (echo max > memory.max) 2>&1; exec sleep 1000";
    let resources = json!({"limits": {"memory": "24Mi", "cpu": "1500m"}, "requests": {"cpu": "500m", "memory": "1Mi"}});
    let mut looker = container("looker", script, resources);
    looker["startupProbe"] = json!({"exec": {"command": ["sh", "-c", "grep -qx 0::/ /proc/self/cgroup"]},
        "periodSeconds": 1, "failureThreshold": 20, "timeoutSeconds": 10});
    let mut changed = looker.clone();
    changed["resources"]["limits"]["memory"] = json!("40Mi");
    let spec = pod(json!([looker]));
    let changed = pod(json!([changed]));
    let mut pod = node.run("view", spec, Way::Grouped).await?;
    // Upon which the probe has passed: an exec is born into the container's group.
    pod.running("looker").await?;
    let group = pod.group.below("looker-0");
    let set = ["memory.oom.group", "cpu.weight"].map(|name| file(&group, name));
    must(set == ["1", "59"], || format!("it was told {set:?}"))?;
    must(
        ["", "0"].contains(&file(&group, "memory.swap.max").as_str()),
        || "it may swap".to_owned(),
    )?;
    let log = pod.log("looker").await?;
    let lines: Vec<&str> = log.lines().collect();
    must(
        lines.len() == 5 && lines[..4] == ["0::/", "25165824", "150000 100000", "59"],
        || format!("it sees {lines:?}"),
    )?;
    must(lines[4].contains("Read-only file system"), || {
        format!("it can write: {}", lines[4])
    })?;
    pod.change("view", changed).await?;
    let now = || ["memory.max", "cpu.max"].map(|name| file(&group, name));
    let began = Instant::now();
    while now() != ["41943040", "150000 100000"] {
        let late = began.elapsed() > Duration::from_secs(20);
        must(!late, || format!("after a change it is told {:?}", now()))?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    pod.end().await?;
    Ok("its own group is the root, and read-only; its limit can change".to_owned())
}

/// A limit below what is in use waits, rather than to kill the container.
pub async fn less_memory(node: &Node) -> Seen {
    let script = "x=0123456789abcdef; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do x=$x$x; done; echo ready; sleep 1000 & wait";
    let spec = |bytes: &str| pod(json!([container("holder", script, memory_limit(bytes))]));
    let mut pod = node.run("less", spec("96Mi"), Way::Grouped).await?;
    pod.running("holder").await?;
    let began = Instant::now();
    let in_time = || began.elapsed() < Duration::from_secs(60);
    while !pod.log("holder").await?.contains("ready") {
        must(in_time(), || "it never had its memory".to_owned())?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let group = pod.group.below("holder-0");
    let limits = || [&group, &pod.group].map(|group| file(group, "memory.max"));
    pod.change("less", spec("2Mi")).await?;
    // Nothing tells that nothing happens; the next change comes after it.
    tokio::time::sleep(Duration::from_secs(2)).await;
    must(limits() == ["100663296", "100663296"], || {
        format!("its limits are {:?}", limits())
    })?;
    pod.change("less", spec("80Mi")).await?;
    while limits() != ["83886080", "83886080"] {
        must(in_time(), || format!("its limits stay {:?}", limits()))?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    must(pod.still_runs("holder").await?, || {
        "it was killed".to_owned()
    })?;
    let usage = group.usage().map_err(|error| error.to_string())?;
    pod.end().await?;
    Ok(format!("{} bytes stay in use", usage.working_set))
}

/// The limit of a pod as a whole holds for containers without one.
pub async fn pod_memory(node: &Node) -> Seen {
    let mut spec = pod(json!([
        container("sibling", SLEEP, json!({})),
        container("eater", EAT, json!({}))
    ]));
    spec["resources"] = memory_limit("40Mi");
    let mut pod = node.run("whole", spec, Way::Grouped).await?;
    pod.running("sibling").await?;
    let end = pod.ended("eater").await?;
    must(end == ("OOMKilled".to_owned(), 137), || {
        format!("it ended with {end:?}")
    })?;
    must(pod.still_runs("sibling").await?, || {
        "its sibling died".to_owned()
    })?;
    pod.end().await?;
    Ok(format!("{end:?}"))
}

/// The same exit code for other reasons is another reason.
pub async fn other_ends(node: &Node) -> Seen {
    let containers = json!([
        container("says-so", "exit 137", memory_limit("16Mi")),
        container(
            "stubborn",
            "trap '' TERM; while :; do sleep 1; done",
            memory_limit("16Mi")
        ),
    ]);
    let mut pod = node.run("ends", pod(containers), Way::Grouped).await?;
    let says_so = pod.ended("says-so").await?;
    pod.running("stubborn").await?;
    pod.stop(0).await?;
    let stubborn = pod.ended("stubborn").await?;
    let error = ("Error".to_owned(), 137);
    must(says_so == error && stubborn == error, || {
        format!("they ended with {says_so:?} and {stubborn:?}")
    })?;
    pod.end().await?;
    Ok(format!("{says_so:?} and {stubborn:?}"))
}

/// A busy loop gets no more than its limit.
pub async fn processors(node: &Node) -> Seen {
    let limit = json!({"limits": {"cpu": "200m"}});
    let containers = json!([container("busy", "while :; do :; done", limit)]);
    let mut pod = node.run("busy", pod(containers), Way::Grouped).await?;
    pod.running("busy").await?;
    let group = pod.group.below("busy-0");
    let look = || group.usage().map_err(|error| error.to_string());
    let (began, before) = (Instant::now(), look()?);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let (wall, after) = (began.elapsed(), look()?);
    let part = (after.cpu_ns - before.cpu_ns) as f64 / wall.as_nanos() as f64;
    // The same is what dashboards are told, with disks and swap, which the groups count too.
    let told = pod.usage("busy").await?;
    pod.end().await?;
    let held_back = |usage: Option<linux::cgroup::Throttling>| {
        usage.map_or((0, 0), |usage| {
            (usage.throttled_periods, usage.throttled_ns)
        })
    };
    let (before, after) = (held_back(before.throttling), held_back(after.throttling));
    let grew = after.0 > before.0 && after.1 > before.1;
    let words = format!(
        "{part:.3} of a processor where 0.2 is the limit, held back: {before:?} to {after:?}, told: {:?} {:?} {:?}",
        told.throttling, told.io, told.memory.swap
    );
    let throttling = told.throttling.unwrap_or_default();
    let is_told = throttling.periods >= throttling.throttled_periods
        && throttling.throttled_periods >= after.0
        && throttling.throttled_ns >= after.1
        && told.io.reads.is_some()
        && told.io.writes.is_some()
        && told.memory.swap.is_some();
    must(part < 0.25 && grew && is_told, || words.clone())?;
    Ok(words)
}

/// A pod that forks without end is stopped while its sandbox still can. This one is a step that divides its own group.
pub async fn processes(node: &Node) -> Seen {
    let most = node
        .groups
        .most_processes()
        .ok_or("processes are not limited")?;
    let fork = "n=0; while sleep 1000 & do n=$((n+1)); echo $n; done";
    let spec = pod(json!([container("bomb", fork, json!({}))]));
    let mut pod = node.run("forks", spec, Way::Step).await?;
    let end = pod.ended("bomb").await?;
    let pods = node.step().below("coracle-pods");
    let limit: u64 = file(&pods, "pids.max")
        .parse()
        .map_err(|_| "pods have no limit")?;
    let log = pod.log("bomb").await?;
    let forked = log
        .lines()
        .filter_map(|line| line.parse::<u64>().ok())
        .max();
    pod.end().await?;
    let words = format!("{end:?} after {forked:?} of {limit} processes, of the job's {most}");
    let stopped = forked.is_some_and(|forked| forked < limit && forked > limit / 2);
    must(end.1 != 0 && stopped && limit < most, || {
        format!("{words}: {log:?}")
    })?;
    let left = node.step().groups();
    must(left.is_empty(), || {
        format!("{left:?} is left of the step's group")
    })?;
    node.step().remove().map_err(|error| error.to_string())?;
    Ok(words)
}

/// What a killed sandbox leaves is no hindrance to the next.
pub async fn killed_sandbox(node: &Node) -> Seen {
    let spec = pod(json!([container("main", SLEEP, memory_limit("16Mi"))]));
    let mut first = node.run("killed", spec.clone(), Way::Grouped).await?;
    first.running("main").await?;
    first.kill().await?;
    let mut second = node.run("killed", spec, Way::Grouped).await?;
    second.running("main").await?;
    let inside = second.group.below("main-0").processes();
    let inside = inside.map_err(|error| error.to_string())?;
    must(inside.len() == 1, || format!("{inside:?}"))?;
    second.end().await?;
    Ok("the next one runs in the same group".to_owned())
}

/// Nothing of a pod that has ended is left.
pub async fn removed(node: &Node) -> Seen {
    let left = node.groups.groups();
    must(left.is_empty(), || format!("{left:?}"))?;
    Ok("nothing is left".to_owned())
}

/// Without groups of its own, a pod is limited by those that it was started in, and still its end is told.
pub async fn without_groups(node: &Node) -> Seen {
    let containers = json!([
        container("sibling", SLEEP, json!({})),
        container("says-so", "exit 137", json!({})),
        container("eater", &format!("sleep 2; {EAT}"), json!({})),
    ]);
    let mut pod = node.run("plain", pod(containers), Way::Plain).await?;
    pod.running("sibling").await?;
    let says_so = pod.ended("says-so").await?;
    let eater = pod.ended("eater").await?;
    let right = says_so == ("Error".to_owned(), 137) && eater == ("OOMKilled".to_owned(), 137);
    must(right, || {
        format!("they ended with {says_so:?} and {eater:?}")
    })?;
    must(pod.still_runs("sibling").await?, || {
        "the sibling died".to_owned()
    })?;
    must(node.groups.groups().is_empty(), || {
        "it has a group".to_owned()
    })?;
    pod.end().await?;
    Ok(format!("{eater:?}, told from {says_so:?}"))
}

/// The machine's root is its initramfs, which no container can leave by pivot_root: a privileged one does not get back to it.
pub async fn node_root(node: &Node) -> Seen {
    let attempts = "setns umount umount-all move pivot chroot open-tree user rootfs";
    let script = format!("for attempt in {attempts}; do escape $attempt; done");
    let mut attacker = container("attacker", &script, json!({}));
    attacker["securityContext"] = json!({"privileged": true});
    let spec = pod(json!([attacker]));
    let mut pod = node.run("attacker", spec, Way::Plain).await?;
    let end = pod.ended("attacker").await?;
    let log = pod.log("attacker").await?;
    pod.end().await?;
    let count = log.matches(": kept out: ").count();
    let all = attempts.split(' ').count();
    must(
        end.1 == 0 && count == all && !log.contains(": reached: "),
        || format!("{end:?}, {}", log.replace('\n', "; ")),
    )?;
    Ok(format!("{count} attempts failed"))
}

/// After the end the group is as we found it: ours alone, and not divided.
pub fn given_back() -> Seen {
    let own = Group::own().ok_or("there is none")?;
    let below = own.groups();
    let alone = own.processes().map_err(|error| error.to_string())?;
    let control = file(&own, "cgroup.subtree_control");
    must(
        below.is_empty() && alone == [std::process::id()] && control.is_empty(),
        || format!("{below:?} {alone:?} {control:?}"),
    )?;
    Ok(own.path().display().to_string())
}
