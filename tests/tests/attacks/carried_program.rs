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
    // With 16 MB the program doesn't fit; with 64 MB the files after it don't.
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

#[test]
fn another_user_cannot_replace_carried_program() {
    let lab = lab("/run/coracle-lab-attacks-carry");
    let mut attacker = attack(&lab, &["swap", "program", "agents", "enter"]);
    // `run` carries the program to leader and agents, `doctor` to one node.
    let run = lab
        .sh("./coracle run -N2 kubectl get nodes -o name")
        .within(150)
        .run();
    let doctor = lab.sh("./coracle doctor --json -p main").run();
    attacker.close_stdin();
    let attacked = attacker.wait(Duration::from_secs(20));
    let executed = lab.root("node1", "cat /var/tmp/executed-by");
    assert_eq!(
        executed.stdout, "",
        "the victim executed the attacker's program{attacked}{run}"
    );
    // The attacker has found the directories, so the attack was a real one.
    let attacked = attacked.succeeded().stdout_has(&["found /tmp/coracle-"]);
    for harm in ["entered", "wrote", "exchanged", "renamed"] {
        assert!(!attacked.stdout.contains(harm), "{harm}{attacked}");
    }
    run.succeeded().stdout_is("node/node1\nnode/node2");
    doctor.succeeded();
    lab.root("node1", "find /tmp /var/tmp -user user1")
        .succeeded()
        .stdout_is("");
}
