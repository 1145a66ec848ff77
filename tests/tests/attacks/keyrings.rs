//! Containers that try to read keys of their user: those of the job and those of other pods.

use std::collections::BTreeMap;
use std::time::Duration;

use e2e::{Lab, TestCluster, eventually, image_pod, pod};
use serde_json::json;

const IMAGE: &str = "coracle.test/perl:1";
/// The machine's perl, which can make any system call.
const LAYER: &str = r"
cp --parents --dereference /usr/bin/perl .
ldd /usr/bin/perl | grep --only-matching '/[^ ]*' | xargs cp --parents --dereference --target-directory=.
tar --owner=0 --group=0 --create *
";

/// Numbers of system calls, of keyctl operations and of special keyrings.
const CALLS: &str = "my ($keyctl, $add_key, $request_key) = (250, 248, 249); my ($id, $join, $link, $search, $read) = (0, 1, 8, 10, 11); \
    my ($process, $session, $user) = (-2, -3, -4); my ($kind, $job, $word, $secret, $left) = ('user', 'job', 'word', 'secret-word', 'left');";

/// A process of the user with a key in its session keyring, like one of a job. It prints the keyring's ID.
const JOB: &str = r#"
$| = 1; syscall($keyctl, $join, $job); syscall($add_key, $kind, $word, $secret, 11, $session) > 0 or die $!;
print "keyring ", syscall($keyctl, $id, $session, 0), "\n"; sleep 1000;
"#;

/// Links the job's keyring, `$KEYRING`, as any process of the user may, and prints its key. Then adds a key to the user keyring,
/// for other pods to find.
const POD: &str = r#"
my $room = "." x 11;
syscall($keyctl, $link, $ENV{KEYRING} + 0, $process); print "link: $!\n";
my $key = syscall($keyctl, $search, $process, $kind, $word, 0); syscall($keyctl, $read, $key, $room, 11); print "word: $room\n";
my $added = syscall($add_key, $kind, $left, $secret, 11, $user); print "add: $added $!\n";
my $found = syscall($request_key, $kind, $left, 0, 0); print "found: $found $!\n";
"#;

/// In the home directory of `user1`.
const DIR: &str = "keyrings";

/// Replaces `srun`: starts agents below a process with a key in its session keyring, as at sites where PAM makes one for each job.
/// The keyring's ID is in a file.
const SRUN: &str = r#"#!/bin/bash
args=()
for arg; do
  if [ "$arg" = internal ]; then
    program=${args[-1]} args[-1]=/usr/bin/perl
    args+=(-e "$(cat ~/keyrings/agent.pl)" "$program")
  fi
  args+=("$arg")
done
exec /usr/bin/srun "${args[@]}"
"#;
const AGENT: &str = r#"
syscall($keyctl, $join, $job); syscall($add_key, $kind, $word, $secret, 11, $session) > 0 or die $!;
open(my $file, ">", "$ENV{HOME}/keyrings/number") or die $!; print $file syscall($keyctl, $id, $session, 0); close $file;
exec @ARGV or die $!;
"#;

/// Prints the ID of its session keyring, the number of keys in it, and whether the job's key is found through it. Then links the
/// job's keyring by its ID, and prints whether the job's key exists at all.
const OWN: &str = r#"
$| = 1; my $room = "." x 64;
my $own = syscall($keyctl, $id, $session, 0); my $keys = syscall($keyctl, $read, $session, $room, 64) / 4;
my $found = syscall($keyctl, $search, $session, $kind, $word, 0); my $result = $found < 0 ? "$!" : "found";
syscall($keyctl, $link, $ENV{KEYRING} + 0, $process); my $state = syscall($keyctl, $search, $process, $kind, $word, 0) > 0 ? "exists" : "missing";
print "session=$own keys=$keys search=$result job=$state\n";
"#;

#[test]
fn containers_and_exec_have_their_own_session_keyrings() {
    let lab = Lab::acquire();
    lab.remove(DIR);
    let config = json!({"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"]});
    lab.load_image(IMAGE, config, LAYER);
    lab.write(&format!("{DIR}/srun"), SRUN);
    lab.write(&format!("{DIR}/agent.pl"), &format!("{CALLS}{AGENT}"));
    let start = format!("chmod 700 {DIR}/srun && PATH=~/{DIR}:$PATH && srun -N1 coracle run bash");
    let mut cluster = TestCluster::from_command(lab.sh(&start).start());
    let job = lab
        .sh(&format!("cat {DIR}/number"))
        .run()
        .succeeded()
        .stdout;
    assert!(job.parse::<i64>().is_ok_and(|number| number > 0), "{job}");

    let program = format!("{CALLS}{OWN}");
    let container = |name: &str| {
        json!({"name": name, "image": IMAGE, "imagePullPolicy": "Never",
            "command": ["perl", "-e", format!("{program} sleep 1000;")],
            "env": [{"name": "KEYRING", "value": job}]})
    };
    // The default seccomp profile would block keyctl.
    let unfiltered = json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}});
    cluster.create_running(&[pod("p", unfiltered, &[container("a"), container("b")])]);
    let mut outputs = BTreeMap::new();
    for name in ["a", "b"] {
        let log = eventually(Duration::from_secs(10), || {
            Some(cluster.logs("p", name)).filter(|log| !log.is_empty())
        });
        outputs.insert(format!("container {name}"), log.unwrap_or_default());
    }
    let quoted = program.replace('\'', r"'\''");
    for number in 1..=2 {
        let command = format!("kubectl exec p --container=a -- perl -e '{quoted}'");
        outputs.insert(format!("command {number}"), cluster.shell(&command));
    }
    let mut seen: BTreeMap<&str, &str> = BTreeMap::from([(job.as_str(), "the job")]);
    for (process, line) in &outputs {
        let own = line
            .strip_prefix("session=")
            .and_then(|rest| rest.split(' ').next());
        let own = own.unwrap_or_default();
        let expected = format!("session={own} keys=0 search=Required key not available job=exists");
        assert_eq!(line.trim(), expected, "{process}: {outputs:#?}");
        let other = seen.insert(own, process);
        assert_eq!(other, None, "{process} has the same: {outputs:#?}");
    }
    cluster.shell("kubectl delete pod p");
    cluster.exit(0);
    lab.remove(DIR);
    lab.assert_nothing_left();
}

#[test]
fn pods_cannot_read_keys_of_their_user() {
    let lab = Lab::acquire();
    let config = json!({"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["sh"]});
    lab.load_image(IMAGE, config, LAYER);
    let program = format!("{CALLS}{JOB}");
    let mut job = lab.command(&["perl", "-e", &program]).on("node1").start();
    let number = eventually(Duration::from_secs(10), || {
        let stdout = job.stdout();
        stdout
            .lines()
            .find_map(|line| line.strip_prefix("keyring ").map(str::to_owned))
    });
    let number = number.expect("the job has a keyring");
    assert_ne!(number, "-1");

    let mut cluster = TestCluster::start_as(&lab, "user1", &["srun", "-N1", "coracle", "run"]);
    let program = format!("{CALLS}{POD}");
    let named = |name: &str, security: serde_json::Value| {
        let more = json!({"imagePullPolicy": "Never", "command": ["perl", "-e", program], "securityContext": security,
            "env": [{"name": "KEYRING", "value": number}]});
        image_pod(name, IMAGE, more)
    };
    let profile = |kind: &str| json!({"seccompProfile": {"type": kind}});
    let unconfined = json!({"privileged": true, "seccompProfile": {"type": "Unconfined"}});
    cluster.create_objects(&[
        named("privileged", json!({"privileged": true})),
        named("plain", json!({})),
        named("privileged-unconfined", unconfined),
        named("default", profile("RuntimeDefault")),
    ]);
    let mut failures = Vec::new();
    for (name, refusal) in [
        ("privileged", "Function not implemented"),
        ("plain", "Function not implemented"),
        ("privileged-unconfined", "Function not implemented"),
        ("default", "Operation not permitted"),
    ] {
        cluster.wait_for_phase(name, "Succeeded");
        let log = cluster.logs(name, "main");
        let expected =
            format!("link: {refusal}\nword: ...........\nadd: -1 {refusal}\nfound: -1 {refusal}\n");
        if log.trim() != expected.trim() {
            failures.push(format!("{name}: {log}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    cluster.exit(0);
    job.signal(rustix::process::Signal::TERM);
    wait_for_exit(&mut job);
    lab.assert_nothing_left();
}

fn wait_for_exit(job: &mut e2e::Running) {
    let exited = eventually(Duration::from_secs(5), || job.has_exited().then_some(()));
    assert!(exited.is_some(), "the job's process exits");
}
