//! `kubectl logs`: all options, all kinds of containers, and logs that containers make difficult.

use std::time::Duration;

use e2e::{
    BUSYBOX, Lab, SmallDisk, TestCluster, eventually, pod, script_container, script_pod, wait_until,
};
use serde_json::{Value, json};

/// The directory of these tests' files.
const DIR: &str = "/tmp/pod-logs";

#[track_caller]
fn cluster(lab: &Lab) -> TestCluster {
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.shell(&format!("rm -rf {DIR}; mkdir {DIR}"));
    cluster
}

#[track_caller]
fn end(lab: &Lab, mut cluster: TestCluster) {
    cluster.shell(&format!("rm -rf {DIR}"));
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Polls until a log contains this text.
#[track_caller]
fn wait_for_log(cluster: &mut TestCluster, logs: &str, expected: &str) {
    let mut last = String::new();
    let logged = eventually(Duration::from_secs(40), || {
        last = cluster.try_shell(&format!("kubectl logs {logs}")).1;
        last.contains(expected).then_some(())
    });
    assert!(logged.is_some(), "{logs}: never {expected:?}: {last}");
}

/// Three lines, more than the API's precision of a second apart, then silence.
const LINES: &str = "echo one; sleep 2.5; echo two >&2; sleep 2.5; echo three; trap 'exit 0' TERM; sleep 1000 & wait";

fn logging_pods() -> Vec<Value> {
    // Its second run continues. The output of the first run is the previous log.
    let again = "if [ -e /mark/once ]; then echo second run; sleep 1000; else touch /mark/once; echo first run; echo its end; exit 5; fi";
    let mark = json!({"volumeMounts": [{"name": "mark", "mountPath": "/mark"}]});
    let restarts =
        json!({"restartPolicy": "Always", "volumes": [{"name": "mark", "emptyDir": {}}]});
    let init = json!({"initContainers": [
        script_container("first", "echo from the first", json!({})),
        script_container("sidecar", "echo from the sidecar; sleep 1000", json!({"restartPolicy": "Always"})),
    ]});
    vec![
        script_pod("lines", LINES, json!({})),
        pod("again", restarts, &[script_container("main", again, mark)]),
        pod(
            "many",
            init,
            &[
                script_container("a", "echo from a; sleep 1000", json!({})),
                script_container("b", "echo from b; sleep 1000", json!({})),
            ],
        ),
        script_pod(
            "torn",
            "printf 'a line\\nno end'; until [ -e /tmp/go ]; do sleep 0.1; done",
            json!({}),
        ),
        script_pod(
            "bytes",
            "printf '\\377\\376\\000\\200 \\303\\050\\n'; head -c 300000 /dev/urandom > /tmp/file; cat /tmp/file; echo; sleep 1000",
            json!({}),
        ),
        script_pod(
            "long",
            "head -c 100000 /dev/zero | tr '\\0' x; echo; echo short; sleep 1000",
            json!({}),
        ),
    ]
}

#[test]
fn all_options_of_kubectl_logs_work() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab);
    cluster.create_running(&logging_pods());
    let waits = pod(
        "waits",
        json!({}),
        &[json!({"name": "main", "image": "coracle.test/none:1", "imagePullPolicy": "Never"})],
    );
    cluster.create_objects(&[waits]);

    wait_for_log(&mut cluster, "lines", "three");
    assert_times_and_lengths_are_respected(&mut cluster);
    assert_previous_logs_are_shown(&mut cluster);
    assert_all_kinds_of_containers_have_logs(&mut cluster);
    assert_binary_and_long_lines_are_unchanged(&mut cluster);
    assert_missing_logs_are_explained(&mut cluster);
    assert_files_have_cri_format(&lab);
    end(&lab, cluster);
}

fn assert_times_and_lengths_are_respected(cluster: &mut TestCluster) {
    let cases = [
        ("lines", "one\ntwo\nthree"),
        ("lines --tail=-1", "one\ntwo\nthree"),
        ("lines --tail=2", "two\nthree"),
        ("lines --tail=1", "three"),
        ("lines --tail=0", ""),
        ("lines --tail=99", "one\ntwo\nthree"),
        ("lines --limit-bytes=6", "one\ntw"),
        ("lines --tail=2 --limit-bytes=5", "two\nt"),
        ("lines --since=1h", "one\ntwo\nthree"),
        ("lines --since-time=2020-01-01T00:00:00Z --tail=1", "three"),
        ("lines --since-time=2120-01-01T00:00:00Z", ""),
        (
            "pod/lines --container=main --prefix",
            "[pod/lines/main] one\n[pod/lines/main] two\n[pod/lines/main] three",
        ),
    ];
    for (options, text) in cases {
        assert_eq!(
            cluster.shell(&format!("kubectl logs {options}")),
            text,
            "{options}"
        );
    }
    let stamped = cluster.shell("kubectl logs lines --timestamps");
    let (times, texts): (Vec<_>, Vec<_>) = stamped
        .lines()
        .filter_map(|line| line.split_once(' '))
        .unzip();
    assert_eq!(texts, ["one", "two", "three"], "{stamped}");
    assert!(
        times
            .iter()
            .all(|time| time.len() == 30 && time.ends_with('Z')),
        "{stamped}"
    );
    assert!(times.is_sorted(), "{stamped}");
    // `--since-time` with a line's own second, truncated, includes that line, but not the one before: lines are more than two
    // seconds apart.
    for (at, expected) in [(1, "two\nthree"), (2, "three")] {
        let second = &times[at][..19];
        let since = cluster.shell(&format!("kubectl logs lines --since-time={second}Z"));
        assert_eq!(since, expected, "since {second}");
    }
    // `--since` shows nothing once the last line is older.
    wait_until(20, "the last line is old", || {
        cluster
            .shell(&format!(
                "echo $(($(date +%s) - $(date +%s --date={})))",
                times[2]
            ))
            .parse()
            .is_ok_and(|age: i64| age > 2)
    });
    assert_eq!(cluster.shell("kubectl logs lines --since=1s"), "");
    // The kubelet can show a single stream, which kubectl does not request yet.
    let node = cluster.first_node();
    for (stream, text) in [("Stderr", "two"), ("Stdout", "one\nthree")] {
        let log =
            format!("/api/v1/nodes/{node}/proxy/containerLogs/default/lines/main?stream={stream}");
        assert_eq!(cluster.shell(&format!("kubectl get --raw '{log}'")), text);
    }
}

fn assert_previous_logs_are_shown(cluster: &mut TestCluster) {
    wait_for_log(cluster, "again", "second run");
    let cases = [
        ("again", "second run"),
        ("again --previous", "first run\nits end"),
        ("again --previous --tail=1", "its end"),
        ("again --previous --follow", "first run\nits end"),
    ];
    for (options, text) in cases {
        assert_eq!(
            cluster.shell(&format!("kubectl logs {options}")),
            text,
            "{options}"
        );
    }
}

fn assert_all_kinds_of_containers_have_logs(cluster: &mut TestCluster) {
    let (code, text) = cluster.try_shell(&format!(
        "timeout 50 kubectl debug many --quiet --container=debugger -i --image={BUSYBOX} --target=a -- echo from the ephemeral one"
    ));
    assert_eq!(code, 0, "{text}");
    wait_for_log(
        cluster,
        "many --container=debugger",
        "from the ephemeral one",
    );
    for (container, text) in [
        ("first", "from the first"),
        ("sidecar", "from the sidecar"),
        ("a", "from a"),
        ("b", "from b"),
        ("debugger", "from the ephemeral one"),
    ] {
        wait_for_log(cluster, &format!("many --container={container}"), text);
        assert_eq!(cluster.logs("many", container), text);
    }
    // Without `--container`, kubectl shows the first container and prints a note.
    assert!(cluster.shell("kubectl logs many").ends_with("from a"));
    let sorted = |text: String| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let prefixed = [
        "[pod/many/a] from a",
        "[pod/many/b] from b",
        "[pod/many/debugger] from the ephemeral one",
        "[pod/many/first] from the first",
        "[pod/many/sidecar] from the sidecar",
    ];
    let all = "kubectl logs --selector=app=many --prefix --all-containers";
    assert_eq!(sorted(cluster.shell(all)), prefixed);
    let followed = cluster.shell(&format!(
        "cd {DIR}; : > all; {all} --follow --max-log-requests=10 > all 2>&1 & \
         until [ $(wc -l < {DIR}/all) -ge 5 ]; do sleep 0.2; done; kill $!; cat {DIR}/all"
    ));
    assert_eq!(sorted(followed), prefixed);
}

fn assert_binary_and_long_lines_are_unchanged(cluster: &mut TestCluster) {
    // An incomplete line is shown without a line feed once the container has exited.
    cluster.shell("kubectl exec torn -- touch /tmp/go");
    cluster.wait_for_phase("torn", "Succeeded");
    assert_eq!(
        cluster.shell("kubectl logs torn | od -An -c | tr -d ' \\n'"),
        "aline\\nnoend"
    );
    assert_eq!(cluster.shell("kubectl logs torn --tail=1"), "no end");
    let stamped = cluster.shell("kubectl logs torn --timestamps --tail=1");
    assert!(stamped.ends_with("Z no end"), "{stamped}");
    // Binary output is passed through unchanged.
    let (in_pod, by_logs) = (
        "kubectl exec bytes -- sh -c '(printf \"\\377\\376\\000\\200 \\303\\050\\n\" | cat - /tmp/file; echo) | sha256sum'",
        "kubectl logs bytes | sha256sum",
    );
    let expected = cluster.shell(in_pod);
    wait_until(20, "all bytes are logged", || {
        cluster.shell(by_logs) == expected
    });
    // A line that is longer than a CRI record is still one line.
    wait_for_log(cluster, "long --tail=1", "short");
    let lengths = cluster.shell("kubectl logs long | while read -r line; do echo ${#line}; done");
    assert_eq!(lengths, "100000\n5");
    assert_eq!(
        cluster.shell("kubectl logs long --tail=2 | wc -c"),
        "100007"
    );
    assert_eq!(cluster.shell("kubectl logs long --timestamps | wc -l"), "2");
    assert_eq!(
        cluster.shell("kubectl logs long --limit-bytes=50000 | wc -c"),
        "50000"
    );
}

fn assert_missing_logs_are_explained(cluster: &mut TestCluster) {
    let cases = [
        (
            "lines --previous",
            "previous terminated container \"main\" in pod \"lines\" not found",
        ),
        (
            "lines --container=other",
            "container other is not valid for pod lines",
        ),
        ("absent", "pods \"absent\" not found"),
        (
            "lines --tail=1 --since=1s --since-time=2020-01-01T00:00:00Z",
            "at most one of",
        ),
    ];
    for (options, error) in cases {
        let (code, text) = cluster.try_shell(&format!("kubectl logs {options}"));
        assert!(code != 0 && text.contains(error), "{options}: {text}");
    }
    let mut last = String::new();
    let reported = eventually(Duration::from_secs(30), || {
        last = cluster.try_shell("kubectl logs waits").1;
        last.contains("container \"main\" in pod \"waits\" is waiting to start: ErrImageNeverPull")
            .then_some(())
    });
    assert!(reported.is_some(), "{last}");
}

/// The files have the format of the CRI, for log collectors on nodes.
fn assert_files_have_cri_format(lab: &Lab) {
    let found = lab.root(
        "node1",
        "find /tmp /var/tmp /dev/shm -path '*/main/0.log' -exec cat {} + | tr -cd '[:print:]\\n' | grep -cE '^[0-9]{4}-[0-9-]{5}T[0-9:]{8}\\.[0-9]{9}Z (stdout|stderr) [FP] '",
    );
    let records: u32 = found.stdout.trim().parse().unwrap_or_default();
    assert!(records >= 8, "{found}");
    let modes = lab.root(
        "node1",
        "find /tmp /var/tmp /dev/shm -name '0.log' ! -perm 600",
    );
    assert_eq!(modes.stdout, "", "other users could read them");
}

/// Numbered lines of 100 bytes each.
fn numbered(lines: u32) -> String {
    format!("yes '' | head -n {lines} | awk '{{ printf \"%09d %090d\\n\", NR, 0 }}'")
}

#[test]
fn logs_are_rotated_and_followed() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab);
    let prints_at_exit = "trap 'echo goodbye; exit 0' TERM; echo hello; sleep 1000 & wait";
    // 25 MB with the overhead of records are less than the limit; 90 MB are more.
    let writes = |lines| {
        format!(
            "until [ -e /tmp/go ]; do sleep 0.1; done; {}; echo done",
            numbered(lines)
        )
    };
    cluster.create_running(&[
        script_pod("deleted", prints_at_exit, json!({})),
        script_pod(
            "ends",
            "echo begin; until [ -e /tmp/go ]; do sleep 0.1; done; echo last",
            json!({}),
        ),
        script_pod("writes", &writes(250_000), json!({})),
        script_pod("floods", &writes(900_000), json!({})),
        script_pod("ticks", TICKS, json!({})),
    ]);
    wait_for_log(&mut cluster, "deleted", "hello");
    wait_for_log(&mut cluster, "ends", "begin");

    // Follow all of them before they write more.
    cluster.shell(&format!(
        "cd {DIR}; for pod in deleted ends writes; do \
           (timeout 150 kubectl logs --follow $pod > $pod.log 2> $pod.errors; echo $? > $pod.code) & \
         done; until grep -q hello deleted.log && grep -q begin ends.log; do sleep 0.1; done"
    ));
    for pod in ["ends", "writes", "floods"] {
        cluster.shell(&format!("kubectl exec {pod} -- touch /tmp/go"));
    }
    // Output is pushed: the last lines arrive without polling.
    cluster.shell("kubectl delete pod deleted --wait=true --timeout=50s");
    let follow_to_end = |cluster: &mut TestCluster, pod: &str| {
        wait_until(120, &format!("kubectl logs --follow {pod} exits"), || {
            cluster.try_shell(&format!("cat {DIR}/{pod}.code")).0 == 0
        });
        cluster.shell(&format!("cd {DIR}; cat {pod}.errors {pod}.code"))
    };
    assert_eq!(follow_to_end(&mut cluster, "deleted"), "0");
    assert_eq!(
        cluster.shell(&format!("cat {DIR}/deleted.log")),
        "hello\ngoodbye"
    );
    assert_eq!(follow_to_end(&mut cluster, "ends"), "0");
    assert_eq!(cluster.shell(&format!("cat {DIR}/ends.log")), "begin\nlast");
    assert_eq!(follow_to_end(&mut cluster, "writes"), "0");
    // Across three rotations, no line is missing or duplicated.
    let count_lines = "awk '/^done$/ { print NR - 1, $0; next } $1 + 0 != NR || length($0) != 100 { print \"wrong:\", NR, $0; exit }'";
    for log in [
        format!("cat {DIR}/writes.log"),
        "kubectl logs writes".to_owned(),
    ] {
        assert_eq!(
            cluster.shell(&format!("{log} | {count_lines}")),
            "250000 done",
            "{log}"
        );
    }
    assert_eq!(
        cluster.shell("kubectl logs writes --tail=150000 | wc -l"),
        "150000"
    );

    // Beyond the limit, the end of the log is kept: at most five files of at most 10 MiB.
    cluster.wait_for_phase("floods", "Succeeded");
    let shown = cluster.shell(&format!("kubectl logs floods > {DIR}/floods.log; wc -c < {DIR}/floods.log; tail -n 1 {DIR}/floods.log"));
    let (bytes, last) = shown.split_once('\n').unwrap_or_default();
    let bytes: u64 = bytes.parse().unwrap_or_default();
    assert!((25_000_000..52_428_800).contains(&bytes), "{shown}");
    assert_eq!(last, "done");
    let gaps = format!(
        "head -n -1 {DIR}/floods.log | awk 'NR > 1 && $1 + 0 != last + 1 {{ print \"wrong:\", last, $0 }} {{ last = $1 + 0 }} END {{ print last }}'"
    );
    assert_eq!(cluster.shell(&gaps), "900000");
    let uid = cluster.shell("kubectl get pod floods --output=jsonpath={.metadata.uid}");
    let files = lab.root(
        "node1",
        &format!("find /tmp /var/tmp /dev/shm -path '*{uid}*/main/0.log*' -printf '%s\\n'"),
    );
    let sizes: Vec<u64> = files
        .stdout
        .lines()
        .filter_map(|line| line.parse().ok())
        .collect();
    assert!((2..=5).contains(&sizes.len()), "{files}");
    assert!(
        sizes.iter().all(|size| *size <= 10 * 1024 * 1024),
        "{files}"
    );
    assert_followed_lines_arrive_at_once(&mut cluster);
    end(&lab, cluster);
}

/// Prints the uptime again and again, not in step with seconds.
const TICKS: &str =
    "trap 'exit 0' TERM; while true; do read now idle < /proc/uptime; echo $now; sleep 0.37; done";

/// Lines arrive immediately. With polling every second, half of them would be half a second late in every attempt; on a busy
/// machine only some attempts are late.
fn assert_followed_lines_arrive_at_once(cluster: &mut TestCluster) {
    let follow = "timeout 50 kubectl logs --follow --tail=1 ticks | { \
        for line in $(seq 16); do read -r sent; read -r now idle < /proc/uptime; echo $sent $now; done; \
        } | awk 'NR > 1 { print $2 - $1 }' | sort --numeric-sort | sed --quiet 8p";
    let mut delays: Vec<f64> = Vec::new();
    while delays.len() < 5 && delays.last().is_none_or(|delay| *delay >= 0.3) {
        let delay = cluster.shell(follow);
        delays.push(delay.parse().unwrap_or_else(|_| panic!("{delay:?}")));
    }
    assert!(
        delays.last().is_some_and(|delay| *delay < 0.3),
        "{delays:?}"
    );
}

/// Fills the disk of its log, and continues to log.
fn fills_the_disk(name: &str, then: &str) -> Value {
    let script = format!(
        "seq 1 500; sleep 1; dd if=/dev/zero of=/data/fill bs=64k 2>/dev/null; seq 501 3000; sleep 1; {then}"
    );
    let mount = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let volumes = json!({"volumes": [{"name": "data", "emptyDir": {}}]});
    pod(name, volumes, &[script_container("main", &script, mount)])
}

/// The number of lost lines, according to the notes in a log.
fn lost(log: &str) -> usize {
    let notes = log.lines().filter_map(|line| {
        assert_eq!(
            line.contains("were lost"),
            line.starts_with("coracle: "),
            "{line}"
        );
        let (count, rest) = line.strip_prefix("coracle: ")?.split_once(' ')?;
        assert!(rest.contains("No space left on device"), "{line}");
        count.parse::<usize>().ok()
    });
    notes.sum()
}

#[test]
fn lines_lost_on_a_full_disk_are_reported() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let disk = SmallDisk::on_node1(&lab, "small", "/tmp", "size=64m,mode=1777");
    let args = ["srun", "-N1", "-wnode1", "coracle", "run"];
    let mut cluster = TestCluster::start_as(&lab, "user1", &args);
    for (name, then) in [
        ("again", "rm /data/fill; sleep 1; echo again"),
        ("ends", "true"),
    ] {
        cluster.create_objects(&[fills_the_disk(name, then)]);
        cluster.wait_for_phase(name, "Succeeded");
        let log = cluster.logs(name, "main");
        let written = log
            .lines()
            .filter(|line| !line.starts_with("coracle: "))
            .count();
        let printed = 3000 + usize::from(name == "again");
        assert!(lost(&log) > 0, "{name}: {log}");
        assert_eq!(written + lost(&log), printed, "{name}: {log}");
        let mut last = log.lines().rev();
        if name == "again" {
            assert_eq!(last.next(), Some("again"));
        }
        assert!(
            last.next().unwrap().starts_with("coracle: "),
            "{name}: {log}"
        );
        cluster.wait_for_event(name, "cannot write the container's log");
        cluster.wait_for_event(name, "of this log were lost: No space left on device");
        cluster.shell(&format!("kubectl delete pod {name} --grace-period=1"));
    }
    cluster.exit(0);
    drop(disk);
    lab.assert_nothing_left();
}
