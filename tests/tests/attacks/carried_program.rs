//! Where there is no shared file system, our program is carried to `/tmp` of the nodes, which other users can write to.

use e2e::{Lab, Running};

const ATTACK: &str = include_str!("carried_program.py");

/// Lets the second user attack on `node1`.
fn attack(lab: &Lab) -> Running {
    let file = "/var/tmp/attack.py";
    let write = lab.call(&["tee", file]).user("user2").on("node1");
    write.stdin(ATTACK).run().succeeded();
    let words = ["python3", file, "swap", "program", "agents", "enter"];
    lab.call(&words).user("user2").on("node1").start()
}

#[test]
fn another_user_cannot_replace_the_carried_program() {
    let lab = Lab::make("/run/coracle-lab-attacks-carry", &["--private-homes"], 2);
    lab.sh(
        "mkdir -p .local/share/coracle/kubernetes && cp /opt/coracle/bin/coracle . &&
         cp -a /opt/coracle/lib/coracle/kubernetes/v1.37.1 .local/share/coracle/kubernetes",
    )
    .run()
    .succeeded();
    let mut attacker = attack(&lab);
    // Leader and agents, the doctor.
    let run = lab
        .sh("./coracle run -N2 kubectl get nodes -o name")
        .within(150)
        .run();
    let doctor = lab.sh("./coracle doctor --json -p main").run();
    attacker.close_stdin();
    let attacked = attacker.wait(std::time::Duration::from_secs(20));
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
