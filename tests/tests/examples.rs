//! The files in `examples/`, each run with the command line in its first comment. `ksi_examples.rs` tests
//! `examples/ksi`, and `make demo` runs `examples/hello`.

use std::time::Duration;

use e2e::Lab;

/// The image of all examples.
const IMAGE: &str = "busybox:1.36";

const EXAMPLES: &str = "/opt/coracle-src/examples";

fn acquire_lab() -> Lab {
    let lab = Lab::acquire();
    lab.load_busybox_as("user1", IMAGE);
    lab
}

#[test]
fn example_job_prints_all_squares() {
    let lab = acquire_lab();
    let output = lab
        .sh(&format!(
            "coracle run -N2 -c2 --mem=1000 {EXAMPLES}/job.yaml"
        ))
        .within(120)
        .run()
        .succeeded();
    output
        .stdout_has(&[
            "/square 0 squared is 0\n",
            "/square 1 squared is 1\n",
            "/square 2 squared is 4\n",
            "/square 3 squared is 9\n",
        ])
        .stderr_has(&["job/squares succeeded after"]);
    lab.assert_nothing_left();
}

#[test]
fn example_deployment_responds_until_cancelled() {
    let lab = acquire_lab();
    let mut run = lab
        .sh(&format!(
            "exec coracle run -N2 --time=30 {EXAMPLES}/deployment.yaml"
        ))
        .start();
    run.wait_for_stderr("deployment/web is ready 2/2");
    let script = "coracle kubectl port-forward deployment/web 8080:8080 & \
                  curl --silent --fail --retry 60 --retry-delay 1 --retry-connrefused http://localhost:8080/; \
                  code=$?; kill $!; exit $code";
    lab.sh(script)
        .within(120)
        .run()
        .succeeded()
        .stdout_has(&["Hello from web-"]);
    lab.sh("scancel --user=user1").run().succeeded();
    run.wait(Duration::from_secs(60))
        .exited_with(143)
        .stderr_has(&["deployment/web had 2/2 pods ready"]);
    // kubectl's cache stays for a day.
    lab.sh(
        "rm -r ~/.cache/coracle/kubectl && rmdir -p --ignore-fail-on-non-empty ~/.cache/coracle",
    )
    .run()
    .succeeded();
    lab.assert_nothing_left();
}

#[test]
fn example_claim_is_shared_by_two_nodes() {
    let lab = acquire_lab();
    let output = lab
        .sh(&format!("coracle run -N2 {EXAMPLES}/claim.yaml"))
        .within(120)
        .run()
        .succeeded();
    let node_of = |part: &str| {
        let found = output.stdout.lines().find_map(|line| line.split_once(part));
        let (_, node) = found.unwrap_or_else(|| panic!("no {part:?}{output}"));
        node.to_owned()
    };
    assert_ne!(node_of("part 0 from "), node_of("part 1 from "), "{output}");
    lab.assert_nothing_left();
}

#[test]
fn example_workflow_passes_results_on() {
    let lab = acquire_lab();
    lab.sh(&format!("coracle run -N2 {EXAMPLES}/workflow.sh"))
        .within(120)
        .run()
        .succeeded()
        .stdout_is("numbers: 1 2 3 4\nsum: 10");
    let script = "sbatch --wait -N2 --output=workflow.out --wrap='coracle run EXAMPLES/workflow.sh' && cat workflow.out";
    lab.sh(&script.replace("EXAMPLES", EXAMPLES))
        .within(120)
        .run()
        .succeeded()
        .stdout_has(&["sum: 10\n"]);
    lab.remove("workflow.out");
    lab.assert_nothing_left();
}

#[test]
fn example_workflow_ends_at_first_failed_job() {
    let lab = acquire_lab();
    let script = format!(
        "mkdir workflow && sed 's/echo 1 2 3 4/exit 3/' {EXAMPLES}/workflow.sh > workflow/failing.sh && \
         coracle run -N1 bash workflow/failing.sh"
    );
    let output = lab.sh(&script).within(120).run().exited_with(1);
    assert!(!output.stderr.contains("job.batch/sum"), "{output}");
    output.stdout_is("").stderr_has(&["job/prepare failed\n"]);
    lab.remove("workflow");
    lab.assert_nothing_left();
}
