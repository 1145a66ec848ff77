//! `coracle run` in every way in which Slurm's users start programs.

use e2e::Lab;

const TWO_READY: &str = "kubectl get nodes --no-headers -o custom-columns=N:.metadata.name,R:.status.conditions[-1].type,S:.status.conditions[-1].status";

fn two_ready_nodes() -> Vec<&'static str> {
    TWO_READY.split(' ').collect()
}

const THE_TWO: &str = "node1   Ready   True\nnode2   Ready   True";

#[test]
fn srun_gives_a_cluster_of_two_ready_nodes() {
    let lab = Lab::ready();
    let mut words = vec!["srun", "-N2", "coracle", "run"];
    words.extend(two_ready_nodes());
    lab.call(&words).run().succeeded().printed(THE_TWO);
    lab.nothing_left();
}
