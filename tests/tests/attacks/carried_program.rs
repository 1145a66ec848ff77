//! Without a shared file system, the program is carried to `/tmp` of the nodes, where other users can create files.

use std::time::Duration;

use e2e::{Lab, Running, wait_until};

const ATTACK: &str = include_str!("carried_program.py");

/// Starts the attacker, `user2`, on `node1`. carried_program.py describes the modes.
fn attack(lab: &Lab, modes: &[&str]) -> Running {
    let file = "/var/tmp/attack.py";
    let write = lab.command(&["tee", file]).user("user2").on("node1");
    write.stdin(ATTACK).run().succeeded();
    let args = [&["python3", file], modes].concat();
    lab.command(&args).user("user2").on("node1").start()
}

/// A lab whose hosts share no home directory. `~/coracle` and a release are on `login` only.
fn lab(name: &str) -> Lab {
    let lab = Lab::create(name, &["--private-homes"], 2);
    lab.sh(
        "mkdir -p .local/share/coracle/kubernetes && cp /opt/coracle/bin/coracle . &&
         cp -a /opt/coracle/lib/coracle/kubernetes/v1.37.1 .local/share/coracle/kubernetes",
    )
    .run()
    .succeeded();
    lab
}

/// The disk is full while the program is carried, so that its new directory is removed again. The task that waits for the program
/// must not use a directory that the attacker makes under the same name.
#[test]
fn removed_directory_of_carried_program_is_not_reused() {
    let lab = lab("/run/coracle-lab-attacks-remake");
    // With 16 MB the program does not fit; with 64 MB the files after it do not.
    for size in ["16M", "64M"] {
        let mount = format!("mount --no-mtab -t tmpfs -o size={size},mode=1777 small /tmp");
        lab.root("node1", &mount).succeeded();
        let mut attacker = attack(&lab, &["remake"]);
        let run = lab.sh("./coracle run -N1 -wnode1 true").within(120).run();
        attacker.close_stdin();
        let attacked = attacker.wait(Duration::from_secs(20));
        let left = lab.root("node1", "find /tmp -mindepth 1 -user user1");
        // Lazily: a process of Slurm may still use it.
        lab.root("node1", "umount --no-mtab --lazy /tmp")
            .succeeded();
        let executed = lab.root("node1", "cat /var/tmp/executed-by");
        assert_eq!(
            executed.stdout, "",
            "the victim executed the attacker's program{attacked}{run}"
        );
        attacked
            .succeeded()
            .stdout_has(&["found /tmp/coracle-", "remade /tmp/coracle-"]);
        run.exited_with(73).stderr_has(&["cannot carry coracle"]);
        left.stdout_is("");
        wait_until(30, "the job has ended", || lab.queue_is_empty());
    }
    // The same command succeeds with enough space and without an attacker.
    let run = lab.sh("./coracle run -N1 -wnode1 true").within(120).run();
    run.succeeded();
}

/// Runs commands of the victim while the attacker tries everything to replace a program that they carry to `node1`.
#[track_caller]
fn assert_not_replaced<T>(lab: &Lab, victim: impl FnOnce() -> T) -> T {
    let mut attacker = attack(lab, &["swap", "program", "agents", "enter"]);
    let result = victim();
    attacker.close_stdin();
    let attacked = attacker.wait(Duration::from_secs(20));
    let executed = lab.root("node1", "cat /var/tmp/executed-by");
    assert_eq!(
        executed.stdout, "",
        "the victim executed the attacker's program{attacked}"
    );
    // The attacker has found the directories, so the attack was a real one.
    let attacked = attacked
        .succeeded()
        .stdout_has(&["found /tmp/coracle-carried."]);
    for harm in ["entered", "wrote", "exchanged", "renamed"] {
        assert!(!attacked.stdout.contains(harm), "{harm}{attacked}");
    }
    result
}

/// Asserts that the victim has left no file where the attacker could have changed one.
#[track_caller]
fn assert_no_files_left(lab: &Lab) {
    lab.root("node1", "find /tmp /var/tmp -user user1")
        .succeeded()
        .stdout_is("");
}

#[test]
fn another_user_cannot_replace_carried_program() {
    let lab = lab("/run/coracle-lab-attacks-carry");
    // `run` carries the program to leader and agents, `doctor` to one node.
    let (run, doctor) = assert_not_replaced(&lab, || {
        let run = lab.sh("./coracle run -N2 kubectl get nodes -o name");
        let doctor = lab.sh("./coracle doctor --json -p main");
        (run.within(150).run(), doctor.run())
    });
    run.succeeded().stdout_is("node/node1\nnode/node2");
    doctor.succeeded();
    assert_no_files_left(&lab);
}

#[test]
fn another_user_cannot_replace_program_carried_for_terminal() {
    let lab = lab("/run/coracle-lab-attacks-carry-more");
    // With a terminal, one step makes the directory and another one executes the program in it.
    let run = assert_not_replaced(&lab, || {
        lab.sh(
            "script -qec './coracle run -N2 bash -c \"tty; kubectl get nodes -o name\"' /dev/null",
        )
        .within(120)
        .run()
    });
    run.succeeded()
        .stdout_has(&["/dev/pts/", "node/node1", "node/node2"]);
    wait_until(30, "the job has ended", || lab.queue_is_empty());
    assert_no_files_left(&lab);

    // `logs` carries the program to the node of a leader that already runs.
    let mut cluster = lab
        .sh("./coracle run -N2 -w'node[1-2]' sh -c 'echo up; cat'")
        .start();
    cluster.wait_for_stdout("up");
    let logs = assert_not_replaced(&lab, || {
        lab.sh("./coracle logs --tail=2 etcd").within(60).run()
    });
    let logs = logs.succeeded();
    assert_eq!(logs.stdout.lines().count(), 2, "{logs}");
    cluster.close_stdin();
    cluster.wait(Duration::from_secs(60)).succeeded();
    wait_until(30, "the job has ended", || lab.queue_is_empty());
    assert_no_files_left(&lab);
}
