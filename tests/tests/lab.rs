//! The lab itself: what the other tests rely on.

use std::time::Duration;

use e2e::{HOSTS, Lab};
use rustix::process::Signal;

#[test]
fn exit_code_input_and_environment_pass_through() {
    let lab = Lab::ready();
    lab.sh("cat; exit 9").stdin("hello").run().ended_with(9);
    lab.sh("cat").stdin("hello").run().printed("hello");
    let facts = "echo $HOME $USER $PWD ${XDG_RUNTIME_DIR-none} $(hostname)";
    lab.sh(facts)
        .run()
        .printed("/home/user1 user1 /home/user1 none login");
    lab.sh("command -v coracle kubectl")
        .run()
        .printed("/opt/coracle/bin/coracle\n/opt/coracle/bin/kubectl");
    lab.nothing_left();
}

#[test]
fn signals_pass_through() {
    let lab = Lab::ready();
    let mut running = lab
        .sh("trap 'echo got it; exit 4' TERM; echo ready; while :; do sleep 0.05; done")
        .start();
    running.until_stdout("ready");
    running.signal(Signal::TERM);
    running
        .wait(Duration::from_secs(10))
        .ended_with(4)
        .shows(&["got it"]);
    lab.nothing_left();
}

#[test]
fn bringing_it_up_again_changes_nothing() {
    let lab = Lab::ready();
    let pids = |host| lab.root(host, "pgrep -x slurmd; pgrep -x slurmctld").stdout;
    let before = HOSTS.map(pids);
    assert_eq!(lab.command("up", &["3"]).code, 0);
    assert_eq!(HOSTS.map(pids), before);
    lab.nothing_left();
}

#[test]
fn it_is_a_slurm_with_accounting_two_partitions_and_two_users() {
    let lab = Lab::ready();
    lab.sh("sinfo -h -o %P | sort | xargs")
        .run()
        .printed("long main*");
    for user in ["user1", "user2"] {
        let words = ["srun", "-N3", "-p", "long", "id", "-un"];
        let said = lab.call(&words).user(user).run().succeeded();
        assert_eq!(said.stdout.lines().filter(|line| *line == user).count(), 3);
    }
    lab.sh("sacct -n -X -o state | head -1")
        .run()
        .succeeded()
        .shows(&["COMPLETED"]);
    lab.root("node1", "cut -d: -f1 /etc/subuid /etc/subgid")
        .shows(&["user1"]);
    let second = lab.root("node1", "grep -c user2 /etc/subuid /etc/subgid");
    assert!(second.code != 0, "user2 has no subordinate ids{second}");
    lab.nothing_left();
}

#[test]
fn homes_are_shared_and_temporary_directories_are_not() {
    let lab = Lab::ready();
    lab.write("shared", "here");
    lab.call(&["cat", "shared"])
        .on("node2")
        .run()
        .printed("here");
    lab.remove("shared");
    lab.root("node1", "touch /tmp/only-here");
    assert!(lab.root("node2", "test -e /tmp/only-here").code != 0);
    lab.root("node1", "rm /tmp/only-here");
    lab.nothing_left();
}

#[test]
fn the_program_needs_no_library() {
    let lab = Lab::ready();
    let said = lab.sh("ldd /opt/coracle/bin/coracle 2>&1").run();
    assert!(
        said.stdout.contains("not a dynamic executable"),
        "it is static{said}"
    );
    lab.nothing_left();
}
