//! Pods as steps of the Slurm job: Slurm allocates and accounts their resources, and reclaims them.

use std::time::Duration;

use e2e::{BUSYBOX, Lab, Role, TestCluster, container_status, wait_until, with_open_input};
use rustix::process::Signal;
use serde_json::Value;

const TICKS: &str = "trap exit TERM; i=0; while true; do i=$((i+1)); echo tick $i; sleep 1; done";

/// A cluster on two nodes with four CPUs each, none of which its own steps hold. The job's limit of open files is low, as at many
/// sites.
#[track_caller]
fn start(lab: &Lab, options: &[&str]) -> TestCluster {
    lab.load_busybox();
    let limited = ["sh", "-c", r#"ulimit -Sn 1000 && exec "$0" "$@""#];
    let run = ["coracle", "run", "-N2", "-c4", "--mem=2000"];
    let args = [&limited[..], &run, options].concat();
    TestCluster::start_as(lab, "user1", &args)
}

/// A pod on `node2`; `more` goes into its metadata, `resources` into its container.
fn pod(name: &str, more: &str, resources: &str, script: &str) -> String {
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata: {{name: {name}{more}}}
spec:
  nodeName: node2
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  containers:
  - name: c
    image: IMAGE
    command: [sh, -c, '{script}', mark-{name}]
    resources: {{requests: {{{resources}}}}}
---
"#
    )
}

const STEP: &str = ", annotations: {coracle.dev/launcher: step}";
const FORK: &str = ", annotations: {coracle.dev/launcher: fork}";

/// `scontrol show step` for the step with this name, if it exists.
fn step(lab: &Lab, name: &str) -> Option<String> {
    let shown = lab
        .command(&["scontrol", "--oneliner", "show", "step"])
        .run();
    let named = format!(" Name={name} ");
    let found = shown.stdout.lines().find(|line| line.contains(&named));
    found.map(str::to_owned)
}

/// State and exit code of the steps with this name in Slurm's accounting.
fn accounted_steps(lab: &Lab, name: &str) -> Vec<String> {
    let shown = lab
        .sh("sacct --noheader --parsable2 --starttime=now-1hour --format=JobName%100,State,ExitCode,AllocCPUS,JobID%40")
        .run()
        .succeeded();
    let mut found: Vec<(String, String)> = shown
        .stdout
        .lines()
        .filter_map(|line| {
            let (step_name, rest) = line.split_once('|')?;
            let (rest, id) = rest.rsplit_once('|')?;
            (step_name == name).then(|| (id.to_owned(), rest.to_owned()))
        })
        .collect();
    // Only the newest job: earlier tests may have used the same name.
    let newest = |id: &str| id.split('.').next().and_then(|job| job.parse::<u32>().ok());
    let last = found.iter().filter_map(|(id, _)| newest(id)).max();
    found.retain(|(id, _)| newest(id) == last);
    found.into_iter().map(|(_, rest)| rest).collect()
}

#[track_caller]
fn assert_accounted(lab: &Lab, name: &str, wanted: &str) {
    let mut last = Vec::new();
    let seen = e2e::eventually(std::time::Duration::from_secs(20), || {
        last = accounted_steps(lab, name);
        last.iter().any(|line| line == wanted).then_some(())
    });
    assert!(seen.is_some(), "{name}: {last:?}, not {wanted}");
}

#[test]
fn pod_is_a_step_with_its_requests() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &[]);
    cluster.create(&lab, &pod("one", STEP, "cpu: 1500m, memory: 300Mi", TICKS));
    cluster.create(&lab, &pod("beside", FORK, "cpu: 100m", TICKS));
    let listens = "while read line; do echo got $line; done; echo end; exit 4";
    let once = "image: IMAGE\n    stdin: true\n    stdinOnce: true";
    let listens = pod("listens", STEP, "cpu: 1", listens).replace("image: IMAGE", once);
    cluster.create(&lab, &listens);
    for name in ["one", "beside", "listens"] {
        cluster.wait_for(name, "condition=Ready");
    }

    let shown = step(&lab, "default/one").expect("the pod has a step");
    for expected in [
        "State=RUNNING",
        "NodeList=node2",
        "CPUs=2 Tasks=1",
        "cpu=2,mem=300M,node=1",
    ] {
        assert!(shown.contains(expected), "{expected}: {shown}");
    }
    assert_eq!(step(&lab, "default/beside"), None);
    // A step cannot grow.
    for (cpu, name) in [("2500m", "one"), ("200m", "beside")] {
        let patch = format!(
            r#"{{"spec":{{"containers":[{{"name":"c","resources":{{"requests":{{"cpu":"{cpu}"}}}}}}]}}}}"#
        );
        cluster.shell(&format!(
            "kubectl patch pod {name} --subresource=resize --patch='{patch}'"
        ));
    }
    cluster.pod_until("one", "reports an infeasible resize", |pod| {
        e2e::condition(pod, "PodResizePending") == "True Infeasible"
    });
    assert_eq!(
        e2e::condition(&cluster.pod("beside"), "PodResizePending"),
        ""
    );
    let [one, beside] = ["one", "beside"].map(|name| ancestors(&lab, &format!("mark-{name}")));
    assert!(
        one.contains("slurmstepd") && !one.contains("internal node"),
        "{one}"
    );
    assert!(beside.contains("internal node"), "{beside}");
    assert!(
        !lab.processes("node2")
            .iter()
            .any(|p| p.args.contains("srun --jobid"))
    );
    // The pods' limit of open files is the job's. The sandbox, which forwards their streams, has a higher one.
    assert_eq!(cluster.shell("ulimit -Sn").trim(), "1000");
    for name in ["one", "beside"] {
        let own = cluster.shell(&format!("kubectl exec {name} -- sh -c 'ulimit -Sn'"));
        assert_eq!(own.trim(), "1000", "{name}");
    }
    let limits =
        "for p in $(pgrep -f 'internal sandbo[x]'); do grep 'Max open files' /proc/$p/limits; done";
    for line in lab.root("node2", limits).succeeded().stdout.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        assert!(fields.len() == 6 && fields[3] == fields[4], "{line}");
    }
    // Both launchers use the same pod network.
    let ips = ["one", "beside"].map(|name| cluster.pod(name)["status"]["podIP"].clone());
    let prefix = |ip: &Value| {
        ip.as_str()
            .map(|ip| ip.rsplit_once('.').map(|(net, _)| net.to_owned()))
    };
    assert_eq!(prefix(&ips[0]), prefix(&ips[1]), "{ips:?}");

    // No environment of a sandbox contains a token.
    let sandbox = lab.root("node2", "for p in $(pgrep -f internal.sandbox); do tr '\\0' '\\n' < /proc/$p/environ; done | grep -ciE 'token|secret'");
    assert_eq!(sandbox.stdout.trim(), "0");
    assert_streams_reach_steps(&lab, &mut cluster);

    cluster.shell("kubectl delete pod one");
    wait_until(10, "its step has ended", || {
        step(&lab, "default/one").is_none()
    });
    assert!(lab.marked("mark-one").is_empty());
    cluster.wait_for("beside", "condition=Ready");
    cluster.exit(0);
    lab.assert_nothing_left();
    // The shell exited after the signal.
    assert_accounted(&lab, "default/one", "COMPLETED|0:0|2");
    assert_accounted(&lab, "default/listens", "FAILED|4:0|1");
}

/// exec, terminals, cp, port-forward and debug, all through the sandbox: strace shows that the agent never enters a namespace.
#[track_caller]
fn assert_streams_reach_steps(lab: &Lab, cluster: &mut TestCluster) {
    let agent = lab.find("node2", Role::Agent).pid.to_string();
    // The last two only prove that strace sees anything.
    let calls = "trace=setns,open,openat,openat2,epoll_wait,epoll_pwait";
    let args = ["strace", "-f", "-e", calls, "-p", &agent];
    let mut trace = lab.command(&args).user("root").on("node2").start();
    trace.wait_for_stderr(" attached");

    let in_temp_dir = |script: &str| {
        format!("dir=$(mktemp -d) && cd $dir && {{ {script}; }}; code=$?; rm -r $dir; exit $code")
    };
    let copies = in_temp_dir(
        "head -c 3000000 /dev/urandom > file && kubectl cp file one:/tmp/copy && \
         kubectl cp one:/tmp/copy back > /dev/null && cmp file back",
    );
    let forwards = in_temp_dir(
        "kubectl port-forward pod/one :8080 > ports 2> errors & forward=$!; \
         until grep -qs Forwarding ports; do sleep 0.1; kill -0 $forward || { cat errors; exit 9; }; done; \
         port=$(sed -n 's/.*127.0.0.1:\\([0-9]*\\) .*/\\1/p' ports); \
         curl -sS http://127.0.0.1:$port/hello; kill $forward; wait $forward; true",
    );
    let debug = format!(
        "timeout 50 kubectl debug one --quiet -i --image={BUSYBOX} --target=c -- \
         sh -c 'read begin; ps | grep -o \"[t]rap exit TERM\" | head -n 1; hostname'"
    );
    let debugs = with_open_input("begin", &debug);
    let cases = [
        (
            "echo text | kubectl exec -i one -- sh -c 'cat; hostname; exit 7' 2> /dev/null",
            7,
            "text\none",
        ),
        (
            "script --quiet --return --command 'kubectl exec -it one -- tty' /dev/null | grep -o /dev/pts/0",
            0,
            "/dev/pts/0",
        ),
        (&copies, 0, ""),
        (
            "kubectl exec one -- sh -c 'echo served > /tmp/hello; httpd -p 127.0.0.1:8080 -h /tmp'",
            0,
            "",
        ),
        (&forwards, 0, "served"),
        (&debugs, 0, "trap exit TERM\none"),
        (
            "printf 'one\\ntwo\\n' | timeout 50 kubectl attach -i listens 2> /dev/null",
            0,
            "got one\ngot two\nend",
        ),
    ];
    for (command, code, text) in cases {
        let result = cluster.try_shell(command);
        assert_eq!(result, (code, text.to_owned()), "{command}");
    }
    cluster.wait_for_phase("listens", "Failed");
    assert_eq!(cluster.logs("listens", "c"), "got one\ngot two\nend");

    trace.signal(Signal::INT);
    let traced = trace.wait(Duration::from_secs(30)).stderr;
    assert!(
        traced.contains("epoll_"),
        "strace shows no system call:\n{traced}"
    );
    let reaches = |line: &&str| {
        let names = ["/ns/", "\"ns", "/root\"", "/root/", "\"root"];
        line.contains("setns(") || names.iter().any(|name| line.contains(name))
    };
    let reaching: Vec<&str> = traced.lines().filter(reaches).collect();
    assert!(reaching.is_empty(), "{reaching:#?}");
}

#[test]
fn completed_pod_frees_its_step_and_keeps_logs() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &["--pods-as-steps"]);
    // Each requests the whole node.
    for (name, code) in [("first", 0), ("second", 7)] {
        cluster.create(
            &lab,
            &pod(
                name,
                "",
                "cpu: 4",
                &format!("echo this is {name}; exit {code}"),
            ),
        );
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        let ended = cluster.wait_for_phase(name, phase);
        let state = &container_status(&ended, "c")["state"]["terminated"];
        assert_eq!(state["exitCode"], code, "{ended:#}");
        wait_until(10, "its step has ended", || {
            step(&lab, &format!("default/{name}")).is_none()
        });
    }
    for name in ["first", "second"] {
        assert_eq!(cluster.logs(name, "c"), format!("this is {name}"));
        let followed = cluster.shell(&format!("kubectl logs --follow --tail=1 {name}"));
        assert_eq!(followed, format!("this is {name}"));
    }
    // The next agent shows the logs too.
    cluster.replace_agent(&lab);
    wait_until(10, "its logs are available", || {
        cluster.try_shell("kubectl logs second") == (0, "this is second".to_owned())
    });
    assert_eq!(cluster.pod("second")["status"]["phase"], "Failed");
    cluster.shell("kubectl delete pod first second");
    wait_until(10, "their logs are removed", || {
        lab.root("node2", "ls /tmp/coracle-*/pods")
            .stdout
            .trim()
            .is_empty()
    });
    cluster.exit(0);
    lab.assert_nothing_left();
    assert_accounted(&lab, "default/first", "COMPLETED|0:0|4");
    assert_accounted(&lab, "default/second", "FAILED|7:0|4");
}

#[test]
fn step_survives_its_agent_and_ends_with_cluster() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &["--pods-as-steps"]);
    cluster.create(&lab, &pod("steady", "", "cpu: 1", TICKS));
    cluster.wait_for("steady", "condition=Ready");
    let before = cluster.pod("steady");
    let process = lab.marked("mark-steady");
    assert_eq!(process.len(), 1, "{process:?}");

    for role in [Role::Agent, Role::AgentGuard] {
        let killed = lab.find("node2", role);
        lab.kill("node2", "KILL", &killed);
        wait_until(30, "a new process runs", || {
            lab.find("node2", role).pid != killed.pid
        });
        wait_until(30, "both nodes are Ready", || cluster.has_ready_nodes(2));
        let ticks = cluster.logs("steady", "c").lines().count();
        wait_until(20, "its log grows", || {
            cluster.logs("steady", "c").lines().count() > ticks
        });
        let after = cluster.pod_until("steady", "is ready", |pod| {
            container_status(pod, "c")["ready"] == true
        });
        for field in ["containerID", "restartCount", "state"] {
            assert_eq!(
                container_status(&before, "c")[field],
                container_status(&after, "c")[field],
                "{role:?}"
            );
        }
        assert_eq!(lab.marked("mark-steady"), process, "{role:?}");
        assert!(step(&lab, "default/steady").is_some());
    }
    // An adopted step is ended like a launched one, also at the end of the cluster.
    cluster.create(&lab, &pod("late", "", "cpu: 1", TICKS));
    cluster.wait_for("late", "condition=Ready");
    cluster.shell("kubectl delete pod steady");
    wait_until(10, "its step has ended", || {
        step(&lab, "default/steady").is_none()
    });
    cluster.run.write("exit 0\n");
    let _ = cluster.ends_within(30);
    lab.assert_nothing_left();
}

#[test]
fn stopped_sandbox_is_killed_with_the_cluster() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &["--pods-as-steps"]);
    cluster.create(&lab, &pod("stuck", "", "cpu: 1", TICKS));
    cluster.wait_for("stuck", "condition=Ready");
    // Stopped processes react to no message and to no signal but SIGKILL.
    for (host, process) in lab.marked("internal sandbox") {
        lab.kill(&host, "STOP", &process);
    }
    cluster.run.write("exit 0\n");
    let _ = cluster.ends_within(30);
    lab.assert_nothing_left();
}

#[test]
fn exclusive_job_has_room_for_steps() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let args = ["coracle", "run", "--pods-as-steps", "-N2", "--exclusive"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    cluster.create(&lab, &pod("large", "", "cpu: 7", "echo large"));
    cluster.wait_for_phase("large", "Succeeded");
    assert_eq!(cluster.logs("large", "c"), "large");
    cluster.exit(0);
    lab.assert_nothing_left();
    assert_accounted(&lab, "default/large", "COMPLETED|0:0|7");
}

#[test]
fn rejected_step_is_reported_at_its_pod() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &[]);
    cluster.create(
        &lab,
        &pod(
            "unknown-launcher",
            ", annotations: {coracle.dev/launcher: stepp}",
            "cpu: 1",
            TICKS,
        ),
    );
    let unknown = cluster.wait_for_phase("unknown-launcher", "Failed");
    assert_eq!(
        unknown["status"]["reason"], "UnknownLauncher",
        "{unknown:#}"
    );
    let message = unknown["status"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains(r#"unknown value "stepp" of annotation coracle.dev/launcher"#),
        "{message}"
    );

    // Steps get whole CPUs, so a fifth does not fit.
    for name in ["a", "b", "c", "d"] {
        cluster.create(&lab, &pod(name, STEP, "cpu: 100m", TICKS));
        cluster.wait_for(name, "condition=Ready");
    }
    cluster.create(&lab, &pod("waiting", STEP, "cpu: 100m", TICKS));
    cluster.wait_for_event(
        "waiting",
        "Normal Queued waiting for resources: Slurm refused: Unable to create step for job",
    );
    cluster.wait_for_event("waiting", "Requested nodes are busy");
    // A pod that waits can be deleted.
    cluster.create(&lab, &pod("unwanted", STEP, "cpu: 100m", TICKS));
    cluster.wait_for_event("unwanted", "Queued waiting for resources");
    cluster.shell("kubectl delete pod unwanted --timeout=20s");
    assert_eq!(cluster.pod("waiting")["status"]["phase"], "Pending");
    // Other pods are not affected.
    cluster.create(&lab, &pod("beside", FORK, "cpu: 100m", TICKS));
    cluster.wait_for("beside", "condition=Ready");
    cluster.shell("kubectl delete pod a");
    cluster.wait_for("waiting", "condition=Ready");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn cancelled_step_is_replaced_by_policy() {
    let lab = Lab::acquire();
    let mut cluster = start(&lab, &["--pods-as-steps"]);
    let always = pod("again", "", "cpu: 4", TICKS).replace("Never", "Always");
    cluster.create(&lab, &always);
    cluster.wait_for("again", "condition=Ready");
    let shown = step(&lab, "default/again").expect("the pod has a step");
    let id = shown
        .split([' ', '='])
        .nth(1)
        .unwrap_or_default()
        .to_owned();
    lab.command(&["scancel", "--signal=KILL", &id])
        .run()
        .succeeded();
    // The new step needs the whole node, while the old one is still completing.
    cluster.pod_until("again", "restarted", |pod| {
        container_status(pod, "c")["restartCount"] == 1
            && container_status(pod, "c")["state"]["running"].is_object()
    });
    let shown = step(&lab, "default/again").expect("the pod has another step");
    assert!(!shown.contains(&format!("StepId={id} ")), "{shown}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

#[test]
fn gpu_is_visible_only_to_its_pod() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(
        &lab,
        "user1",
        &[
            "coracle",
            "run",
            "--pods-as-steps",
            "-N1",
            "-wnode1",
            "-c4",
            "--gres=gpu:2",
        ],
    );
    for (name, gpus) in [("one", 1), ("none", 0)] {
        let manifest = pod(name, "", &format!("cpu: 1, nvidia.com/gpu: {gpus}"), TICKS)
            .replace("nodeName: node2", "nodeName: node1")
            .replace(
                "resources: {requests:",
                &format!("resources: {{limits: {{nvidia.com/gpu: {gpus}}}, requests:"),
            );
        cluster.create(&lab, &manifest);
        cluster.wait_for(name, "condition=Ready");
    }
    let shown = step(&lab, "default/one").expect("the pod has a step");
    assert!(
        shown.contains("gres/gpu=1") || shown.contains("TresPerNode=gres:gpu:1"),
        "{shown}"
    );
    let shown = step(&lab, "default/none").expect("the pod has a step");
    assert!(!shown.contains("gpu"), "{shown}");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// The command lines of all ancestors of the process with this mark.
#[track_caller]
fn ancestors(lab: &Lab, mark: &str) -> String {
    let all = lab.processes("node2");
    let mut process = all.iter().find(|process| process.args.ends_with(mark));
    let mut lines = Vec::new();
    while let Some(found) = process {
        lines.push(found.args.clone());
        process = all.iter().find(|other| other.pid == found.parent);
    }
    assert!(!lines.is_empty(), "no process {mark}: {all:#?}");
    lines.join("\n")
}
