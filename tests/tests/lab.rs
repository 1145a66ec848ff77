//! The lab itself: guarantees on which the other tests rely.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use e2e::{HOSTS, Lab};
use rustix::process::{Pid, Signal, kill_process_group};

#[test]
fn exit_code_input_and_environment_pass_through() {
    let lab = Lab::acquire();
    lab.sh("cat; exit 9").stdin("hello").run().exited_with(9);
    lab.sh("cat").stdin("hello").run().stdout_is("hello");
    let facts = "echo $HOME $USER $PWD ${XDG_RUNTIME_DIR-none} $(hostname)";
    lab.sh(facts)
        .run()
        .stdout_is("/home/user1 user1 /home/user1 none login");
    lab.sh("command -v coracle kubectl")
        .run()
        .stdout_is("/opt/coracle/bin/coracle\n/opt/coracle/bin/kubectl");
    lab.assert_nothing_left();
}

#[test]
fn signals_pass_through() {
    let lab = Lab::acquire();
    let mut running = lab
        .sh("trap 'echo got it; exit 4' TERM; echo ready; while :; do sleep 0.05; done")
        .start();
    running.wait_for_stdout("ready");
    running.signal(Signal::TERM);
    running
        .wait(Duration::from_secs(10))
        .exited_with(4)
        .stdout_has(&["got it"]);
    lab.assert_nothing_left();
}

#[test]
fn second_up_changes_nothing() {
    let lab = Lab::acquire();
    let pids = |host| lab.root(host, "pgrep -x slurmd; pgrep -x slurmctld").stdout;
    let before = HOSTS.map(pids);
    assert_eq!(lab.lab_command("up", &["3"]).code, 0);
    assert_eq!(HOSTS.map(pids), before);
    lab.assert_nothing_left();
}

#[test]
fn slurm_has_accounting_two_partitions_and_two_users() {
    let lab = Lab::acquire();
    lab.sh("sinfo -h -o %P | sort | xargs")
        .run()
        .stdout_is("long main*");
    for user in ["user1", "user2"] {
        let args = ["srun", "-N3", "-p", "long", "id", "-un"];
        let output = lab.command(&args).user(user).run().succeeded();
        let lines = output.stdout.lines();
        assert_eq!(lines.filter(|line| *line == user).count(), 3);
    }
    lab.sh("sacct -n -X -o state | sort -u")
        .run()
        .succeeded()
        .stdout_has(&["COMPLETED"]);
    lab.root("node1", "cut -d: -f1 /etc/subuid /etc/subgid")
        .stdout_has(&["user1"]);
    let second = lab.root("node1", "grep -c user2 /etc/subuid /etc/subgid");
    assert!(second.code != 0, "user2 has no subordinate ids{second}");
    lab.assert_nothing_left();
}

#[test]
fn homes_are_shared_but_temporary_directories_are_not() {
    let lab = Lab::acquire();
    lab.write("shared", "here");
    lab.command(&["cat", "shared"])
        .on("node2")
        .run()
        .stdout_is("here");
    lab.remove("shared");
    lab.root("node1", "touch /tmp/only-here");
    assert!(lab.root("node2", "test -e /tmp/only-here").code != 0);
    lab.root("node1", "rm /tmp/only-here");
    lab.assert_nothing_left();
}

#[test]
fn program_is_statically_linked() {
    let lab = Lab::acquire();
    let output = lab.sh("ldd /opt/coracle/bin/coracle 2>&1").run();
    assert!(
        output.stdout.contains("not a dynamic executable"),
        "not statically linked{output}"
    );
    lab.assert_nothing_left();
}

#[test]
fn interrupted_up_is_repaired_and_down_leaves_nothing() {
    const DIR: &str = "/run/coracle-lab-ends";
    let up = || {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/up"));
        command
            .arg("1")
            .env("CORACLE_LAB_DIR", DIR)
            .process_group(0);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let pids = || -> Vec<String> {
        let records = std::fs::read_dir(format!("{DIR}/pids"))
            .into_iter()
            .flatten();
        // A host that is being created has a named pipe there: opening that would block.
        let is_file = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|t| t.is_file());
        let record = |entry: std::fs::DirEntry| {
            is_file(&entry)
                .then(|| std::fs::read_to_string(entry.path()).ok())
                .flatten()
        };
        let text = records.flatten().filter_map(record);
        text.filter_map(|r| Some(r.split_whitespace().next()?.to_owned()))
            .collect()
    };
    // Kill it during the start, with its current child processes.
    let mut first = up();
    e2e::wait_until(30, "hosts are starting", || pids().len() >= 2);
    let group = Pid::from_raw(first.id().cast_signed()).unwrap();
    kill_process_group(group, Signal::KILL).unwrap();
    first.wait().unwrap();
    assert!(!std::path::Path::new(DIR).join("ready").exists());
    let old = pids();

    let lab = Lab::create(DIR, &[], 1);
    lab.command(&["srun", "hostname"])
        .run()
        .succeeded()
        .stdout_is("node1");
    let hosts = pids();
    assert!(
        hosts.len() == 3 && hosts.iter().all(|pid| !old.contains(pid)),
        "{old:?} {hosts:?}"
    );
    let namespaces: Vec<String> = hosts
        .iter()
        .flat_map(|pid| ["net", "mnt"].map(|kind| format!("/proc/{pid}/ns/{kind}")))
        .filter_map(|link| Some(std::fs::read_link(link).ok()?.display().to_string()))
        .filter(|name| !is_of_this_machine(name))
        .collect();
    assert!(namespaces.len() >= 5, "{namespaces:?}");
    assert_eq!(lab.lab_command("down", &[]).code, 0);

    // No process is left in the namespaces or mounts of its hosts, and no file has its name.
    e2e::wait_until(10, "no process is left in the namespaces", || {
        let seen = lab.machine("find /proc/[0-9]*/ns -lname '*:\\[*' -printf '%l\\n' 2>/dev/null");
        namespaces.iter().all(|name| !seen.contains(name.as_str()))
    });
    let mounts = lab.machine(&format!("grep -l {DIR} /proc/[0-9]*/mountinfo 2>/dev/null"));
    assert_eq!(mounts, "");
    let files = lab.machine(&format!("ls -d {DIR}* /run/netns/*lab-ends* 2>/dev/null"));
    assert_eq!(files, "");
}

/// Whether a namespace is the machine's own: some holders have only some namespaces of their own.
fn is_of_this_machine(namespace: &str) -> bool {
    ["net", "mnt"]
        .iter()
        .filter_map(|kind| std::fs::read_link(format!("/proc/self/ns/{kind}")).ok())
        .any(|own| own.display().to_string() == namespace)
}

#[test]
fn unchanged_upstream_is_not_rebuilt() {
    let lab = Lab::acquire();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let release = "target/dist/lib/coracle/kubernetes/v1.37.1";
    // A wrapper of `go` that fails for `go build`.
    let script = format!(
        "cd {root} && mkdir -p target/e2e && printf '%s\\n' '#!/bin/sh' \
           '[ \"$1\" != build ] || exit 99' 'exec '$(command -v go)' \"$@\"' > target/e2e/go && chmod +x target/e2e/go &&
         stat -Lc %i.%Y {release}/kube && PATH=$PWD/target/e2e:$PATH kubernetes/build {release} && stat -Lc %i.%Y {release}/kube;
         code=$?; rm -r target/e2e; exit $code"
    );
    let output = lab.machine(&script);
    let lines: Vec<&str> = output.lines().collect();
    assert!(lines.len() == 2 && lines[0] == lines[1], "{output}");
    lab.assert_nothing_left();
}
