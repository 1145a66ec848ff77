//! What a new user meets in the first hour: checks before a job is requested, the queue, facts about the allocation, completion.

use std::time::Duration;

use e2e::{Lab, Role, eventually};

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: [{name: c, image: busybox}]}\n";

/// A namespace and an object in it, which `kubectl apply --dry-run=server` would reject.
const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: mine}\n---\n\
                         apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings, namespace: mine}\n";

/// The id that Slurm will give to the next job: the number of jobs so far shows whether one was requested.
fn last_job(lab: &Lab) -> String {
    let jobs = "sacct --allusers --noheader --allocations --starttime now-1days --format JobID | tail -n 1";
    lab.root("login", jobs).stdout.trim().to_owned()
}

#[test]
fn invalid_manifests_are_found_before_a_job_is_requested() {
    let lab = Lab::acquire();
    let before = last_job(&lab);
    for (name, text, problem) in [
        (
            "syntax.yaml",
            format!("{POD}---\nkind: [\n"),
            "syntax.yaml:6: ",
        ),
        (
            "kind.yaml",
            POD.replace("kind: Pod\n", ""),
            "kind.yaml:1: no kind",
        ),
        (
            "name.yaml",
            POD.replace("name: a", "name: My_Pod"),
            "My_Pod",
        ),
        (
            "image.yaml",
            POD.replace("busybox", "Busy:Box:1"),
            "couldn't parse image name",
        ),
        (
            "list.yaml",
            "apiVersion: v1\nkind: List\nitems: [{kind: Pod}]\n".to_owned(),
            "no apiVersion",
        ),
        ("nothing.yaml", "# nothing\n".to_owned(), "no object"),
    ] {
        lab.write(&format!("bad/{name}"), &text);
        for script in [
            format!("coracle run -N1 bad/{name}"),
            format!("coracle run -N1 - < bad/{name}"),
        ] {
            let output = lab.sh(&script).run().exited_with(65);
            let problem = match script.contains(" - ") {
                true => problem.replace(name, "standard input"),
                false => problem.to_owned(),
            };
            output.stderr_has(&["error: the manifests are invalid", &problem, "hint: "]);
        }
    }
    // All files of a directory in one error.
    lab.sh("coracle run -N1 bad")
        .run()
        .exited_with(65)
        .stderr_has(&["bad/kind.yaml:1", "bad/syntax.yaml:6"]);
    lab.sh("coracle run -N1 --kubernetes /nowhere true")
        .run()
        .exited_with(72)
        .stderr_has(&["/nowhere", "hint: "]);
    lab.remove("bad");
    assert_eq!(last_job(&lab), before, "a job was requested");
    lab.assert_nothing_left();
}

#[test]
fn manifests_from_standard_input_are_applied() {
    let lab = Lab::acquire();
    let output = lab
        .sh("coracle run -N1 -")
        .stdin(NAMESPACE)
        .run()
        .succeeded();
    output.stderr_has(&[
        "namespace/mine applied",
        "configmap/settings in mine applied",
    ]);
    lab.assert_nothing_left();
}

#[test]
fn dry_run_asks_slurm_and_an_api_server() {
    let lab = Lab::acquire();
    let before = last_job(&lab);
    lab.write("dry/good.yaml", NAMESPACE);
    let expected = [
        "Slurm would accept the job",
        "the API server accepts configmap/settings in mine",
    ];
    for script in [
        "coracle run --dry-run -N2 dry/good.yaml",
        "coracle run -N2 --dry-run - < dry/good.yaml",
    ] {
        lab.sh(script)
            .within(120)
            .run()
            .succeeded()
            .stderr_has(&expected);
    }
    lab.write(
        "dry/unknown.yaml",
        &POD.replace("spec: {", "spec: {container: [], "),
    );
    lab.sh("coracle run --dry-run dry/unknown.yaml")
        .within(120)
        .run()
        .exited_with(65)
        .stderr_has(&["unknown field \"spec.container\"", "hint: "]);
    lab.sh("coracle run --dry-run -p nope true")
        .run()
        .exited_with(69)
        .stderr_has(&["nope", "hint: "]);
    lab.sh("coracle run --dry-run -N2 true")
        .run()
        .succeeded()
        .stderr_has(&["true would run"]);
    assert_eq!(last_job(&lab), before, "a job was requested");
    // In a job there is no request, and one task checks.
    let output = lab
        .sh("srun -N2 coracle run --dry-run dry/good.yaml")
        .within(120)
        .run()
        .succeeded();
    assert!(!output.stderr.contains("Slurm would"), "{output}");
    assert_eq!(
        output.stderr.matches("accepts namespace/mine").count(),
        1,
        "{output}"
    );
    lab.remove("dry");
    lab.assert_nothing_left();
}

#[test]
fn queued_job_names_reason_and_expected_start() {
    let lab = Lab::acquire();
    let mut holder = lab
        .sh("srun -N2 -wnode[1-2] --exclusive --time=5 bash -c 'echo held; sleep 300'")
        .start();
    holder.wait_for_stdout("held");
    let mut queued = lab.sh("exec coracle run -wnode1 -N1 --time=1 true").start();
    queued.wait_for_stderr("is queued (Resources: it waits for nodes to become free)");
    // Slurm's scheduler makes an estimate later, and a second line has it.
    queued.wait_for_stderr("Slurm expects it to start in");
    holder.signal(rustix::process::Signal::TERM);
    let output = queued.wait(Duration::from_secs(120)).succeeded();
    assert!(
        !output.stderr.contains("queued and waiting for resources"),
        "{output}"
    );
    output.stderr_has(&["is ready after"]);
    holder.wait(Duration::from_secs(60));
    lab.assert_nothing_left();
}

#[test]
fn ready_line_names_resources_of_nodes() {
    let lab = Lab::acquire();
    let hint = "--exclusive and --mem=0 request whole nodes";
    let small = lab.sh("coracle run -N2 -wnode[1-2] true").run().succeeded();
    small.stderr_has(&[
        "with 2 nodes is ready after ",
        " s: 1 CPU and 500 MB each\n",
        hint,
    ]);
    let script = "coracle run -wnode1 -N1 -c4 --mem=2000 true";
    let large = lab.sh(script).run().succeeded();
    assert!(!large.stderr.contains(hint), "{large}");
    large.stderr_has(&["with 1 node is ready after ", " s: 4 CPUs and 2000 MB\n"]);
    lab.assert_nothing_left();
}

#[test]
fn command_lines_are_short() {
    let lab = Lab::acquire();
    let mut running = lab
        .sh("exec coracle run -N2 -wnode[1-2] bash -c 'echo up; env; read line'")
        .start();
    running.wait_for_stdout("up");
    lab.find("node1", Role::LeaderWorker);
    let on_login = lab.processes_of("login", "user1");
    let srun = on_login
        .iter()
        .find(|process| process.args.contains("--job-name=coracle"));
    let srun = srun.expect("srun runs on login");
    assert!(
        srun.args.len() < 400 && !srun.args.contains("mktemp"),
        "{}",
        srun.args
    );
    running.close_stdin();
    let output = running.wait(Duration::from_secs(60));
    assert!(!output.stdout.contains("SLURM_CORACLE"), "{output}");
    // If srun passes hardly any of the user's variables on, too.
    let script = "coracle run -N1 --export=PATH,HOME true";
    lab.sh(script)
        .run()
        .succeeded()
        .stderr_has(&["is ready after"]);
    lab.assert_nothing_left();
}

#[test]
fn completion_offers_running_clusters_and_partitions() {
    let lab = Lab::acquire();
    let mut running = lab
        .sh("exec coracle run -N1 bash -c 'echo up $SLURM_JOB_ID; read line'")
        .start();
    running.wait_for_stdout("up ");
    let job = running.stdout().trim().trim_start_matches("up ").to_owned();
    // As bash calls the function that completes.
    let complete = |words: &str| {
        let script = format!(
            "source <(coracle completion bash); COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _clap_complete_coracle coracle \"${{COMP_WORDS[-1]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        lab.sh(&script).run().succeeded().stdout.trim().to_owned()
    };
    let jobs = eventually(Duration::from_secs(20), || {
        Some(complete("coracle logs --job ''")).filter(|found| *found == job)
    });
    assert!(
        jobs.is_some(),
        "job {job}, completed {}",
        complete("coracle logs --job ''")
    );
    assert_eq!(complete("coracle doctor -p ''"), "main long");
    assert_eq!(complete("coracle run --partit"), "--partition");
    running.close_stdin();
    running.wait(Duration::from_secs(60));
    for shell in ["zsh", "fish"] {
        lab.sh(&format!("coracle completion {shell}"))
            .run()
            .succeeded()
            .stdout_has(&["CORACLE_COMPLETE"]);
    }
    lab.sh("coracle man run")
        .run()
        .succeeded()
        .stdout_has(&[".TH coracle-run 1", ".SH SYNOPSIS"]);
    lab.assert_nothing_left();
}
