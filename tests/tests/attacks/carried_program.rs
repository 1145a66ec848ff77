//! Where there is no shared file system, our program is carried to `/tmp` of the nodes, which other users can write to.

use std::time::Duration;

use e2e::{Lab, Running, wait_until};

const ATTACK: &str = include_str!("carried_program.py");

/// Lets the second user attack on `node1`.
fn attack(lab: &Lab, ways: &[&str]) -> Running {
    let file = "/var/tmp/attack.py";
    let write = lab.call(&["tee", file]).user("user2").on("node1");
    write.stdin(ATTACK).run().succeeded();
    let words = [&["python3", file], ways].concat();
    lab.call(&words).user("user2").on("node1").start()
}

/// A lab whose hosts share no home; `~/coracle` and a release are on `login` only.
fn lab(name: &str) -> Lab {
    let lab = Lab::make(name, &["--private-homes"], 2);
    lab.sh(
        "mkdir -p .local/share/coracle/kubernetes && cp /opt/coracle/bin/coracle . &&
         cp -a /opt/coracle/lib/coracle/kubernetes/v1.37.1 .local/share/coracle/kubernetes",
    )
    .run()
    .succeeded();
    lab
}

/// The disk is full while the program is carried, so that the directory made for it is removed. The task that wanted it still waits.
#[test]
fn another_user_cannot_take_the_place_of_a_removed_directory() {
    let lab = lab("/run/coracle-lab-attacks-remake");
    // The program doesn't fit, or what follows it doesn't.
    for size in ["16M", "64M"] {
        let mount = format!("mount --no-mtab -t tmpfs -o size={size},mode=1777 small /tmp");
        lab.root("node1", &mount).succeeded();
        let mut attacker = attack(&lab, &["remake"]);
        let run = lab.sh("./coracle run -N1 -wnode1 true").within(120).run();
        attacker.close_stdin();
        let attacked = attacker.wait(Duration::from_secs(20));
        let left = lab.root("node1", "find /tmp -mindepth 1 -user user1");
        // Slurm's own may still be looking at it.
        lab.root("node1", "umount --no-mtab --lazy /tmp")
            .succeeded();
        let executed = lab.root("node1", "cat /var/tmp/executed-by");
        assert_eq!(executed.stdout, "", "the victim executed it{attacked}{run}");
        attacked
            .succeeded()
            .shows(&["found /tmp/coracle-", "remade /tmp/coracle-"]);
        run.ended_with(73).says(&["cannot carry coracle"]);
        left.printed("");
        wait_until(30, "the job has ended", || lab.queue_is_empty());
    }
    // The same command, with room on the disk and without the attacker.
    let run = lab.sh("./coracle run -N1 -wnode1 true").within(120).run();
    run.succeeded();
}

#[test]
fn another_user_cannot_replace_the_carried_program() {
    let lab = lab("/run/coracle-lab-attacks-carry");
    let mut attacker = attack(&lab, &["swap", "program", "agents", "enter"]);
    // Leader and agents, the doctor.
    let run = lab
        .sh("./coracle run -N2 kubectl get nodes -o name")
        .within(150)
        .run();
    let doctor = lab.sh("./coracle doctor --json -p main").run();
    attacker.close_stdin();
    let attacked = attacker.wait(Duration::from_secs(20));
    let executed = lab.root("node1", "cat /var/tmp/executed-by");
    assert_eq!(executed.stdout, "", "the victim executed it{attacked}{run}");
    // It has seen what there is to see.
    let attacked = attacked.succeeded().shows(&["found /tmp/coracle-"]);
    for harm in ["entered", "wrote", "exchanged", "renamed"] {
        assert!(!attacked.stdout.contains(harm), "{harm}{attacked}");
    }
    run.succeeded().printed("node/node1\nnode/node2");
    doctor.succeeded();
    lab.root("node1", "find /tmp /var/tmp -user user1")
        .succeeded()
        .printed("");
}
