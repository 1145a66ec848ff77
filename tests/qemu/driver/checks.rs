//! The checks of the driver.

use std::time::{Duration, Instant};

use linux::cgroup::Cgroup;
use serde_json::{Value, json};

use crate::CheckResult;
use crate::node::{DriverNode, LaunchMode};

/// Allocates memory without end, as a child of the container's first process.
const ALLOCATE: &str = "tail /dev/zero; code=$?; echo survived; exit $code";
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

fn ensure(holds: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem()) }
}

fn file(group: &Cgroup, name: &str) -> String {
    let text = std::fs::read_to_string(group.path().join(name)).unwrap_or_default();
    text.trim().to_owned()
}

/// If a container exceeds its memory limit, all of its processes are killed. Its sibling continues.
pub async fn container_memory(node: &DriverNode) -> CheckResult {
    let containers = json!([
        container("sibling", SLEEP, memory_limit("16Mi")),
        container("eater", ALLOCATE, memory_limit("32Mi")),
    ]);
    let mut pod = node
        .run("memory", pod(containers), LaunchMode::Cgroup)
        .await?;
    pod.running("sibling").await?;
    ensure(file(&pod.group, "memory.max") == "50331648", || {
        format!("the pod's limit is {}", file(&pod.group, "memory.max"))
    })?;
    let end = pod.terminated("eater").await?;
    ensure(end == ("OOMKilled".to_owned(), 137), || {
        format!("it terminated with {end:?}")
    })?;
    let log = pod.log("eater").await?;
    ensure(!log.contains("survived"), || {
        "its first process survived".to_owned()
    })?;
    ensure(pod.still_runs("sibling").await?, || {
        "its sibling died".to_owned()
    })?;
    let sibling = pod.group.child("sibling-0");
    ensure(sibling.oom_kills() == Some(0), || {
        format!("{:?}", sibling.oom_kills())
    })?;
    let usage = sibling.usage().map_err(|error| error.to_string())?;
    ensure(
        usage.working_set > 0 && usage.processes == 1 && usage.cpu_ns > 0,
        || format!("{usage:?}"),
    )?;
    pod.end().await?;
    Ok(format!(
        "{end:?}, the sibling uses {} bytes",
        usage.working_set
    ))
}

/// A container sees its own cgroup as the root, cannot change it, and probe commands run in the same cgroup.
pub async fn cgroup_view(node: &DriverNode) -> CheckResult {
    let script = "cat /proc/self/cgroup; cd /sys/fs/cgroup; cat memory.max cpu.max cpu.weight; (echo max > memory.max) 2>&1; exec sleep 1000";
    let resources = json!({"limits": {"memory": "24Mi", "cpu": "1500m"}, "requests": {"cpu": "500m", "memory": "1Mi"}});
    let mut looker = container("looker", script, resources);
    looker["startupProbe"] = json!({"exec": {"command": ["sh", "-c", "grep -qx 0::/ /proc/self/cgroup"]},
        "periodSeconds": 1, "failureThreshold": 20, "timeoutSeconds": 10});
    let mut changed = looker.clone();
    changed["resources"]["limits"]["memory"] = json!("40Mi");
    let spec = pod(json!([looker]));
    let changed = pod(json!([changed]));
    let mut pod = node.run("view", spec, LaunchMode::Cgroup).await?;
    // Once it has started, the probe has passed: its command ran in the container's cgroup.
    pod.running("looker").await?;
    let group = pod.group.child("looker-0");
    let set = ["memory.oom.group", "cpu.weight"].map(|name| file(&group, name));
    ensure(set == ["1", "59"], || format!("its settings are {set:?}"))?;
    ensure(
        ["", "0"].contains(&file(&group, "memory.swap.max").as_str()),
        || "it may swap".to_owned(),
    )?;
    let log = pod.log("looker").await?;
    let lines: Vec<&str> = log.lines().collect();
    ensure(
        lines.len() == 5 && lines[..4] == ["0::/", "25165824", "150000 100000", "59"],
        || format!("it sees {lines:?}"),
    )?;
    ensure(lines[4].contains("Read-only file system"), || {
        format!("it can write: {}", lines[4])
    })?;
    pod.change("view", changed).await?;
    let now = || ["memory.max", "cpu.max"].map(|name| file(&group, name));
    let start = Instant::now();
    while now() != ["41943040", "150000 100000"] {
        let late = start.elapsed() > Duration::from_secs(20);
        ensure(!late, || {
            format!("after the resize, its limits are {:?}", now())
        })?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    pod.end().await?;
    Ok("its own cgroup is the root, and read-only; its limit can change".to_owned())
}

/// A memory limit below the current usage is not applied, so that the container is not killed.
pub async fn limit_below_usage(node: &DriverNode) -> CheckResult {
    let script = "x=0123456789abcdef; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18; do x=$x$x; done; echo ready; sleep 1000 & wait";
    let spec = |bytes: &str| pod(json!([container("holder", script, memory_limit(bytes))]));
    let mut pod = node.run("less", spec("96Mi"), LaunchMode::Cgroup).await?;
    pod.running("holder").await?;
    let start = Instant::now();
    let in_time = || start.elapsed() < Duration::from_secs(60);
    while !pod.log("holder").await?.contains("ready") {
        ensure(in_time(), || {
            "it did not allocate its memory in time".to_owned()
        })?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let group = pod.group.child("holder-0");
    let limits = || [&group, &pod.group].map(|group| file(group, "memory.max"));
    pod.change("less", spec("2Mi")).await?;
    // The absence of a change has no event, so wait.
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure(limits() == ["100663296", "100663296"], || {
        format!("its limits are {:?}", limits())
    })?;
    pod.change("less", spec("80Mi")).await?;
    while limits() != ["83886080", "83886080"] {
        ensure(in_time(), || format!("its limits are still {:?}", limits()))?;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ensure(pod.still_runs("holder").await?, || {
        "it was killed".to_owned()
    })?;
    let usage = group.usage().map_err(|error| error.to_string())?;
    pod.end().await?;
    Ok(format!("{} bytes stay in use", usage.working_set))
}

/// The pod-level limit applies to containers without a limit of their own.
pub async fn pod_memory(node: &DriverNode) -> CheckResult {
    let mut spec = pod(json!([
        container("sibling", SLEEP, json!({})),
        container("eater", ALLOCATE, json!({}))
    ]));
    spec["resources"] = memory_limit("40Mi");
    let mut pod = node.run("pod-limit", spec, LaunchMode::Cgroup).await?;
    pod.running("sibling").await?;
    let end = pod.terminated("eater").await?;
    ensure(end == ("OOMKilled".to_owned(), 137), || {
        format!("it terminated with {end:?}")
    })?;
    ensure(pod.still_runs("sibling").await?, || {
        "its sibling died".to_owned()
    })?;
    pod.end().await?;
    Ok(format!("{end:?}"))
}

/// Exit code 137 without an OOM kill has the reason `Error`, not `OOMKilled`.
pub async fn exit_reasons(node: &DriverNode) -> CheckResult {
    let containers = json!([
        container("exits-137", "exit 137", memory_limit("16Mi")),
        container(
            "ignores-sigterm",
            "trap '' TERM; while :; do sleep 1; done",
            memory_limit("16Mi")
        ),
    ]);
    let mut pod = node
        .run("ends", pod(containers), LaunchMode::Cgroup)
        .await?;
    let exits = pod.terminated("exits-137").await?;
    pod.running("ignores-sigterm").await?;
    pod.stop(0).await?;
    let ignores = pod.terminated("ignores-sigterm").await?;
    let error = ("Error".to_owned(), 137);
    ensure(exits == error && ignores == error, || {
        format!("they terminated with {exits:?} and {ignores:?}")
    })?;
    pod.end().await?;
    Ok(format!("{exits:?} and {ignores:?}"))
}

/// A busy loop gets no more CPU time than its limit.
pub async fn cpu_limit(node: &DriverNode) -> CheckResult {
    let limit = json!({"limits": {"cpu": "200m"}});
    let containers = json!([container("busy", "while :; do :; done", limit)]);
    let mut pod = node
        .run("busy", pod(containers), LaunchMode::Cgroup)
        .await?;
    pod.running("busy").await?;
    let group = pod.group.child("busy-0");
    let usage_now = || group.usage().map_err(|error| error.to_string());
    let (start, before) = (Instant::now(), usage_now()?);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let (wall, after) = (start.elapsed(), usage_now()?);
    let share = (after.cpu_ns - before.cpu_ns) as f64 / wall.as_nanos() as f64;
    // The sandbox reports the same, and also IO and swap of the cgroup.
    let reported = pod.usage("busy").await?;
    pod.end().await?;
    let throttled = |usage: Option<linux::cgroup::CpuThrottling>| {
        usage.map_or((0, 0), |usage| {
            (usage.throttled_periods, usage.throttled_ns)
        })
    };
    let (before, after) = (throttled(before.throttling), throttled(after.throttling));
    let grew = after.0 > before.0 && after.1 > before.1;
    let summary = format!(
        "{share:.3} CPUs with a limit of 0.2, throttled: {before:?} to {after:?}, reported: {:?} {:?} {:?}",
        reported.throttling, reported.io, reported.memory.swap
    );
    let throttling = reported.throttling.unwrap_or_default();
    let is_reported = throttling.periods >= throttling.throttled_periods
        && throttling.throttled_periods >= after.0
        && throttling.throttled_ns >= after.1
        && reported.io.reads.is_some()
        && reported.io.writes.is_some()
        && reported.memory.swap.is_some();
    ensure(share < 0.25 && grew && is_reported, || summary.clone())?;
    Ok(summary)
}

/// The limit of processes stops a fork bomb, and leaves some to the sandbox. This pod is a step that divides its own cgroup.
pub async fn process_limit(node: &DriverNode) -> CheckResult {
    let job_limit = node.groups.pids_max().ok_or("processes are not limited")?;
    let fork = "n=0; while sleep 1000 & do n=$((n+1)); echo $n; done";
    let spec = pod(json!([container("bomb", fork, json!({}))]));
    let mut pod = node.run("forks", spec, LaunchMode::Step).await?;
    let end = pod.terminated("bomb").await?;
    let pods = node.step().child("coracle-pods");
    let limit: u64 = file(&pods, "pids.max")
        .parse()
        .map_err(|_| "pods have no limit")?;
    let log = pod.log("bomb").await?;
    let forked = log
        .lines()
        .filter_map(|line| line.parse::<u64>().ok())
        .max();
    pod.end().await?;
    let summary =
        format!("{end:?} after {forked:?} of {limit} processes, of the job's {job_limit}");
    let stopped = forked.is_some_and(|forked| forked < limit && forked > limit / 2);
    ensure(end.1 != 0 && stopped && limit < job_limit, || {
        format!("{summary}: {log:?}")
    })?;
    let left = node.step().children();
    ensure(left.is_empty(), || {
        format!("cgroups left in the step's cgroup: {left:?}")
    })?;
    node.step().remove().map_err(|error| error.to_string())?;
    Ok(summary)
}

/// The cgroups of a killed sandbox do not prevent the start of its replacement.
pub async fn killed_sandbox(node: &DriverNode) -> CheckResult {
    let spec = pod(json!([container("main", SLEEP, memory_limit("16Mi"))]));
    let mut first = node.run("killed", spec.clone(), LaunchMode::Cgroup).await?;
    first.running("main").await?;
    first.kill().await?;
    let mut second = node.run("killed", spec, LaunchMode::Cgroup).await?;
    second.running("main").await?;
    let inside = second.group.child("main-0").processes();
    let inside = inside.map_err(|error| error.to_string())?;
    ensure(inside.len() == 1, || format!("{inside:?}"))?;
    second.end().await?;
    Ok("the next one runs in the same cgroup".to_owned())
}

/// No cgroup of a terminated pod is left.
pub async fn cgroups_are_removed(node: &DriverNode) -> CheckResult {
    let left = node.groups.children();
    ensure(left.is_empty(), || format!("{left:?}"))?;
    Ok("no cgroup is left".to_owned())
}

/// A pod without its own cgroups is limited by those of the job. OOM kills are still reported.
pub async fn without_cgroups(node: &DriverNode) -> CheckResult {
    let containers = json!([
        container("sibling", SLEEP, json!({})),
        container("exits-137", "exit 137", json!({})),
        container("eater", &format!("sleep 2; {ALLOCATE}"), json!({})),
    ]);
    let mut pod = node
        .run("plain", pod(containers), LaunchMode::NoCgroup)
        .await?;
    pod.running("sibling").await?;
    let exits = pod.terminated("exits-137").await?;
    let eater = pod.terminated("eater").await?;
    let is_right = exits == ("Error".to_owned(), 137) && eater == ("OOMKilled".to_owned(), 137);
    ensure(is_right, || {
        format!("they terminated with {exits:?} and {eater:?}")
    })?;
    ensure(pod.still_runs("sibling").await?, || {
        "the sibling died".to_owned()
    })?;
    ensure(node.groups.children().is_empty(), || {
        "it has a cgroup".to_owned()
    })?;
    pod.end().await?;
    Ok(format!("{eater:?} and {exits:?}"))
}

/// The node's root is its initramfs, which pivot_root(2) cannot replace. A privileged container cannot reach it.
pub async fn node_root_is_inaccessible(node: &DriverNode) -> CheckResult {
    let attempts = "setns umount umount-all move pivot chroot open-tree user rootfs";
    let script = format!("for attempt in {attempts}; do escape $attempt; done");
    let mut attacker = container("attacker", &script, json!({}));
    attacker["securityContext"] = json!({"privileged": true});
    let spec = pod(json!([attacker]));
    let mut pod = node.run("attacker", spec, LaunchMode::NoCgroup).await?;
    let end = pod.terminated("attacker").await?;
    let log = pod.log("attacker").await?;
    pod.end().await?;
    let count = log.matches(": blocked: ").count();
    let all = attempts.split(' ').count();
    ensure(
        end.1 == 0 && count == all && !log.contains(": reached: "),
        || format!("{end:?}, {}", log.replace('\n', "; ")),
    )?;
    Ok(format!("{count} attempts failed"))
}

/// At the end, the driver's cgroup contains only the driver, and is not divided.
pub fn cgroup_is_restored() -> CheckResult {
    let own = Cgroup::own().ok_or("no cgroup")?;
    let below = own.children();
    let alone = own.processes().map_err(|error| error.to_string())?;
    let control = file(&own, "cgroup.subtree_control");
    ensure(
        below.is_empty() && alone == [std::process::id()] && control.is_empty(),
        || format!("{below:?} {alone:?} {control:?}"),
    )?;
    Ok(own.path().display().to_string())
}
