//! `kubectl logs`: all options, all kinds of containers, and logs that containers make difficult.

use std::time::Duration;

use e2e::{BUSYBOX, Cluster, Lab, SmallDisk, eventually, pod, runs, simple, wait_until};
use serde_json::{Value, json};

/// The directory of these tests' files.
const DIR: &str = "/tmp/pod-logs";

#[track_caller]
fn cluster(lab: &Lab) -> Cluster {
    lab.load_busybox();
    let mut cluster = Cluster::start_as(lab, "user1", &["srun", "-N1", "coracle", "run"]);
    cluster.ask(&format!("rm -rf {DIR}; mkdir {DIR}"));
    cluster
}

#[track_caller]
fn end(lab: &Lab, mut cluster: Cluster) {
    cluster.ask(&format!("rm -rf {DIR}"));
    cluster.exit(0);
    lab.nothing_left();
}

/// Polls until a log contains this text.
#[track_caller]
fn until_logged(cluster: &mut Cluster, logs: &str, words: &str) {
    let mut last = String::new();
    let logged = eventually(Duration::from_secs(40), || {
        last = cluster.try_ask(&format!("kubectl logs {logs}")).1;
        last.contains(words).then_some(())
    });
    assert!(logged.is_some(), "{logs}: never {words:?}: {last}");
}

/// Three lines, more than the API's precision of a second apart, then silence.
const LINES: &str = "echo one; sleep 2.5; echo two >&2; sleep 2.5; echo three; trap 'exit 0' TERM; sleep 1000 & wait";

fn of_options() -> Vec<Value> {
    // Its second run continues. The output of the first run is the previous log.
    let again = "if [ -e /mark/once ]; then echo second run; sleep 1000; else touch /mark/once; echo first run; echo its end; exit 5; fi";
    let mark = json!({"volumeMounts": [{"name": "mark", "mountPath": "/mark"}]});
    let restarts =
        json!({"restartPolicy": "Always", "volumes": [{"name": "mark", "emptyDir": {}}]});
    let init = json!({"initContainers": [
        runs("first", "echo from the first", json!({})),
        runs("sidecar", "echo from the sidecar; sleep 1000", json!({"restartPolicy": "Always"})),
    ]});
    vec![
        simple("lines", LINES, json!({})),
        pod("again", restarts, &[runs("main", again, mark)]),
        pod(
            "many",
            init,
            &[
                runs("a", "echo from a; sleep 1000", json!({})),
                runs("b", "echo from b; sleep 1000", json!({})),
            ],
        ),
        simple(
            "torn",
            "printf 'a line\\nno end'; until [ -e /tmp/go ]; do sleep 0.1; done",
            json!({}),
        ),
        simple(
            "bytes",
            "printf '\\377\\376\\000\\200 \\303\\050\\n'; head -c 300000 /dev/urandom > /tmp/file; cat /tmp/file; echo; sleep 1000",
            json!({}),
        ),
        simple(
            "long",
            "head -c 100000 /dev/zero | tr '\\0' x; echo; echo short; sleep 1000",
            json!({}),
        ),
    ]
}

#[test]
fn all_options_of_kubectl_logs_work() {
    let lab = Lab::ready();
    let mut cluster = cluster(&lab);
    cluster.create_running(&of_options());
    let waits = pod(
        "waits",
        json!({}),
        &[json!({"name": "main", "image": "coracle.test/none:1", "imagePullPolicy": "Never"})],
    );
    cluster.create_objects(&[waits]);

    until_logged(&mut cluster, "lines", "three");
    times_and_lengths(&mut cluster);
    earlier_runs(&mut cluster);
    all_kinds_of_containers(&mut cluster);
    bytes_of_all_kinds(&mut cluster);
    what_has_no_log_says_why(&mut cluster);
    records_are_those_of_the_cri(&lab);
    end(&lab, cluster);
}

fn times_and_lengths(cluster: &mut Cluster) {
    let asked = [
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
    for (options, text) in asked {
        assert_eq!(
            cluster.ask(&format!("kubectl logs {options}")),
            text,
            "{options}"
        );
    }
    let stamped = cluster.ask("kubectl logs lines --timestamps");
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
        let since = cluster.ask(&format!("kubectl logs lines --since-time={second}Z"));
        assert_eq!(since, expected, "since {second}");
    }
    // `--since` shows nothing once the last line is older.
    wait_until(20, "the last line is old", || {
        cluster
            .ask(&format!(
                "echo $(($(date +%s) - $(date +%s --date={})))",
                times[2]
            ))
            .parse()
            .is_ok_and(|age: i64| age > 2)
    });
    assert_eq!(cluster.ask("kubectl logs lines --since=1s"), "");
    // The kubelet can show a single stream, which kubectl does not request yet.
    let node = cluster.first_node();
    for (stream, text) in [("Stderr", "two"), ("Stdout", "one\nthree")] {
        let log =
            format!("/api/v1/nodes/{node}/proxy/containerLogs/default/lines/main?stream={stream}");
        assert_eq!(cluster.ask(&format!("kubectl get --raw '{log}'")), text);
    }
}

fn earlier_runs(cluster: &mut Cluster) {
    until_logged(cluster, "again", "second run");
    let asked = [
        ("again", "second run"),
        ("again --previous", "first run\nits end"),
        ("again --previous --tail=1", "its end"),
        ("again --previous --follow", "first run\nits end"),
    ];
    for (options, text) in asked {
        assert_eq!(
            cluster.ask(&format!("kubectl logs {options}")),
            text,
            "{options}"
        );
    }
}

fn all_kinds_of_containers(cluster: &mut Cluster) {
    let (code, text) = cluster.try_ask(&format!(
        "timeout 50 kubectl debug many --quiet --container=looks -i --image={BUSYBOX} --target=a -- echo from the ephemeral one"
    ));
    assert_eq!(code, 0, "{text}");
    until_logged(cluster, "many --container=looks", "from the ephemeral one");
    for (container, text) in [
        ("first", "from the first"),
        ("sidecar", "from the sidecar"),
        ("a", "from a"),
        ("b", "from b"),
        ("looks", "from the ephemeral one"),
    ] {
        until_logged(cluster, &format!("many --container={container}"), text);
        assert_eq!(cluster.logs("many", container), text);
    }
    // Without `--container`, kubectl shows the first container and prints a note.
    assert!(cluster.ask("kubectl logs many").ends_with("from a"));
    let sorted = |text: String| {
        let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let prefixed = [
        "[pod/many/a] from a",
        "[pod/many/b] from b",
        "[pod/many/first] from the first",
        "[pod/many/looks] from the ephemeral one",
        "[pod/many/sidecar] from the sidecar",
    ];
    let all = "kubectl logs --selector=app=many --prefix --all-containers";
    assert_eq!(sorted(cluster.ask(all)), prefixed);
    let followed = cluster.ask(&format!(
        "cd {DIR}; : > all; {all} --follow --max-log-requests=10 > all 2>&1 & \
         until [ $(wc -l < {DIR}/all) -ge 5 ]; do sleep 0.2; done; kill $!; cat {DIR}/all"
    ));
    assert_eq!(sorted(followed), prefixed);
}

fn bytes_of_all_kinds(cluster: &mut Cluster) {
    // An incomplete line is shown without a line feed once the container has exited.
    cluster.ask("kubectl exec torn -- touch /tmp/go");
    cluster.in_phase("torn", "Succeeded");
    assert_eq!(
        cluster.ask("kubectl logs torn | od -An -c | tr -d ' \\n'"),
        "aline\\nnoend"
    );
    assert_eq!(cluster.ask("kubectl logs torn --tail=1"), "no end");
    let stamped = cluster.ask("kubectl logs torn --timestamps --tail=1");
    assert!(stamped.ends_with("Z no end"), "{stamped}");
    // Binary output is passed through unchanged.
    let (there, here) = (
        "kubectl exec bytes -- sh -c '(printf \"\\377\\376\\000\\200 \\303\\050\\n\" | cat - /tmp/file; echo) | sha256sum'",
        "kubectl logs bytes | sha256sum",
    );
    let expected = cluster.ask(there);
    wait_until(20, "all bytes are logged", || cluster.ask(here) == expected);
    // A line that is longer than a CRI record is still one line.
    until_logged(cluster, "long --tail=1", "short");
    let lengths = cluster.ask("kubectl logs long | while read -r line; do echo ${#line}; done");
    assert_eq!(lengths, "100000\n5");
    assert_eq!(cluster.ask("kubectl logs long --tail=2 | wc -c"), "100007");
    assert_eq!(cluster.ask("kubectl logs long --timestamps | wc -l"), "2");
    assert_eq!(
        cluster.ask("kubectl logs long --limit-bytes=50000 | wc -c"),
        "50000"
    );
}

fn what_has_no_log_says_why(cluster: &mut Cluster) {
    let asked = [
        (
            "lines --previous",
            "previous terminated container \"main\" in pod \"lines\" not found",
        ),
        (
            "lines --container=other",
            "container other is not valid for pod lines",
        ),
        ("nobody", "pods \"nobody\" not found"),
        (
            "lines --tail=1 --since=1s --since-time=2020-01-01T00:00:00Z",
            "at most one of",
        ),
    ];
    for (options, words) in asked {
        let (code, text) = cluster.try_ask(&format!("kubectl logs {options}"));
        assert!(code != 0 && text.contains(words), "{options}: {text}");
    }
    let mut last = String::new();
    let told = eventually(Duration::from_secs(30), || {
        last = cluster.try_ask("kubectl logs waits").1;
        last.contains("container \"main\" in pod \"waits\" is waiting to start: ErrImageNeverPull")
            .then_some(())
    });
    assert!(told.is_some(), "{last}");
}

/// The files have the format of the CRI, for log collectors on nodes.
fn records_are_those_of_the_cri(lab: &Lab) {
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
    assert_eq!(modes.stdout, "", "others could read them");
}

/// Numbered lines of 100 bytes each.
fn numbered(lines: u32) -> String {
    format!("yes '' | head -n {lines} | awk '{{ printf \"%09d %090d\\n\", NR, 0 }}'")
}

#[test]
fn logs_are_rotated_and_followed() {
    let lab = Lab::ready();
    let mut cluster = cluster(&lab);
    let says_goodbye = "trap 'echo goodbye; exit 0' TERM; echo hello; sleep 1000 & wait";
    // 25 MB with the overhead of records are less than the limit; 90 MB are more.
    let writes = |lines| {
        format!(
            "until [ -e /tmp/go ]; do sleep 0.1; done; {}; echo done",
            numbered(lines)
        )
    };
    cluster.create_running(&[
        simple("deleted", says_goodbye, json!({})),
        simple(
            "ends",
            "echo begin; until [ -e /tmp/go ]; do sleep 0.1; done; echo last",
            json!({}),
        ),
        simple("writes", &writes(250_000), json!({})),
        simple("floods", &writes(900_000), json!({})),
        simple("ticks", TICKS, json!({})),
    ]);
    until_logged(&mut cluster, "deleted", "hello");
    until_logged(&mut cluster, "ends", "begin");

    // Follow all of them before anything happens.
    cluster.ask(&format!(
        "cd {DIR}; for pod in deleted ends writes; do \
           (timeout 150 kubectl logs --follow $pod > $pod.log 2> $pod.errors; echo $? > $pod.code) & \
         done; until grep -q hello deleted.log && grep -q begin ends.log; do sleep 0.1; done"
    ));
    for pod in ["ends", "writes", "floods"] {
        cluster.ask(&format!("kubectl exec {pod} -- touch /tmp/go"));
    }
    // Output is pushed: the last lines arrive without polling.
    cluster.ask("kubectl delete pod deleted --wait=true --timeout=50s");
    let ended = |cluster: &mut Cluster, pod: &str| {
        wait_until(120, &format!("{pod} is followed to its end"), || {
            cluster.try_ask(&format!("cat {DIR}/{pod}.code")).0 == 0
        });
        cluster.ask(&format!("cd {DIR}; cat {pod}.errors {pod}.code"))
    };
    assert_eq!(ended(&mut cluster, "deleted"), "0");
    assert_eq!(
        cluster.ask(&format!("cat {DIR}/deleted.log")),
        "hello\ngoodbye"
    );
    assert_eq!(ended(&mut cluster, "ends"), "0");
    assert_eq!(cluster.ask(&format!("cat {DIR}/ends.log")), "begin\nlast");
    assert_eq!(ended(&mut cluster, "writes"), "0");
    // Across three rotations, no line is missing or duplicated.
    let whole = "awk '/^done$/ { print NR - 1, $0; next } $1 + 0 != NR || length($0) != 100 { print \"wrong:\", NR, $0; exit }'";
    for log in [
        format!("cat {DIR}/writes.log"),
        "kubectl logs writes".to_owned(),
    ] {
        assert_eq!(
            cluster.ask(&format!("{log} | {whole}")),
            "250000 done",
            "{log}"
        );
    }
    assert_eq!(
        cluster.ask("kubectl logs writes --tail=150000 | wc -l"),
        "150000"
    );

    // Beyond the limit, the end of the log is kept: at most five files of at most 10 MiB.
    cluster.in_phase("floods", "Succeeded");
    let shown = cluster.ask(&format!("kubectl logs floods > {DIR}/floods.log; wc -c < {DIR}/floods.log; tail -n 1 {DIR}/floods.log"));
    let (bytes, last) = shown.split_once('\n').unwrap_or_default();
    let bytes: u64 = bytes.parse().unwrap_or_default();
    assert!((25_000_000..52_428_800).contains(&bytes), "{shown}");
    assert_eq!(last, "done");
    let gaps = format!(
        "head -n -1 {DIR}/floods.log | awk 'NR > 1 && $1 + 0 != last + 1 {{ print \"wrong:\", last, $0 }} {{ last = $1 + 0 }} END {{ print last }}'"
    );
    assert_eq!(cluster.ask(&gaps), "900000");
    let uid = cluster.ask("kubectl get pod floods --output=jsonpath={.metadata.uid}");
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
    what_is_followed_is_pushed(&mut cluster);
    end(&lab, cluster);
}

/// Prints the uptime again and again, not in step with seconds.
const TICKS: &str =
    "trap 'exit 0' TERM; while true; do read now idle < /proc/uptime; echo $now; sleep 0.37; done";

/// Lines arrive immediately. With polling every second, half of them would be half a second late in every attempt; on a busy
/// machine only some attempts are late.
fn what_is_followed_is_pushed(cluster: &mut Cluster) {
    let follow = "timeout 50 kubectl logs --follow --tail=1 ticks | { \
        for line in $(seq 16); do read -r said; read -r now idle < /proc/uptime; echo $said $now; done; \
        } | awk 'NR > 1 { print $2 - $1 }' | sort --numeric-sort | sed --quiet 8p";
    let mut tries: Vec<f64> = Vec::new();
    while tries.len() < 5 && tries.last().is_none_or(|late| *late >= 0.3) {
        let late = cluster.ask(follow);
        tries.push(late.parse().unwrap_or_else(|_| panic!("{late:?}")));
    }
    assert!(tries.last().is_some_and(|late| *late < 0.3), "{tries:?}");
}

/// Fills the disk of its log, and continues to log.
fn fills_the_disk(name: &str, then: &str) -> Value {
    let script = format!(
        "seq 1 500; sleep 1; dd if=/dev/zero of=/data/fill bs=64k 2>/dev/null; seq 501 3000; sleep 1; {then}"
    );
    let mount = json!({"volumeMounts": [{"name": "data", "mountPath": "/data"}]});
    let volumes = json!({"volumes": [{"name": "data", "emptyDir": {}}]});
    pod(name, volumes, &[runs("main", &script, mount)])
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
    let lab = Lab::ready();
    lab.load_busybox();
    let disk = SmallDisk::on_node1(&lab, "small", "/tmp", "size=64m,mode=1777");
    let words = ["srun", "-N1", "-wnode1", "coracle", "run"];
    let mut cluster = Cluster::start_as(&lab, "user1", &words);
    for (name, then) in [
        ("again", "rm /data/fill; sleep 1; echo again"),
        ("ends", "true"),
    ] {
        cluster.create_objects(&[fills_the_disk(name, then)]);
        cluster.in_phase(name, "Succeeded");
        let log = cluster.logs(name, "main");
        let written = log
            .lines()
            .filter(|line| !line.starts_with("coracle: "))
            .count();
        let said = 3000 + usize::from(name == "again");
        assert!(lost(&log) > 0, "{name}: {log}");
        assert_eq!(written + lost(&log), said, "{name}: {log}");
        let mut last = log.lines().rev();
        if name == "again" {
            assert_eq!(last.next(), Some("again"));
        }
        assert!(
            last.next().unwrap().starts_with("coracle: "),
            "{name}: {log}"
        );
        cluster.event(name, "cannot write the container's log");
        cluster.event(name, "of this log were lost: No space left on device");
        cluster.ask(&format!("kubectl delete pod {name} --grace-period=1"));
    }
    cluster.exit(0);
    drop(disk);
    lab.nothing_left();
}
