//! Tests resource limits on a kernel with cgroups v2 that are delegated to an ordinary user (tests/qemu/run).
//!
//! The driver replaces the kubelet of one node: it divides its own cgroup, starts the real `coracle internal hub` and one
//! `coracle internal sandbox` for each pod, sends them pods, and inspects the cgroups. It prints one line for each check, and a
//! verdict, to the console, where tests/tests/cgroups.rs reads them.

mod checks;
mod node;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use linux::cgroup::DelegatedCgroup;

/// Time in which killed processes must have exited.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of a check: a summary, or the reason of the failure.
type CheckResult = Result<String, String>;

fn main() -> ExitCode {
    // Like the agent's guard.
    if let Err(error) = linux::process::become_subreaper() {
        print_line(&format!("cannot become a subreaper: {error}"));
    }
    let delegated = match DelegatedCgroup::set_up("coracle-node", "coracle-pods") {
        Ok(delegated) => delegated,
        Err(error) => {
            print_line(&format!(
                "VERDICT failed: {error}: {:?}",
                std::error::Error::source(&error)
            ));
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let passed = match runtime {
        Ok(runtime) => runtime.block_on(run_checks(&delegated)),
        Err(error) => {
            print_line(&format!("cannot start the runtime: {error}"));
            false
        }
    };
    if let Err(error) = linux::process::kill_descendants(KILL_TIMEOUT) {
        print_line(&format!("cannot kill all processes: {error}"));
    }
    delegated.tear_down();
    let passed = report("cgroup-is-restored", checks::cgroup_is_restored()) && passed;
    print_line(if passed {
        "VERDICT ok"
    } else {
        "VERDICT failed"
    });
    ExitCode::from(u8::from(!passed))
}

async fn run_checks(delegated: &DelegatedCgroup) -> bool {
    let node = match node::DriverNode::start(delegated.workloads().clone()).await {
        Ok(node) => node,
        Err(problem) => return report("node", Err(problem)),
    };
    let results = [
        report(
            "container-memory-limit",
            checks::container_memory(&node).await,
        ),
        report("container-cgroup-view", checks::cgroup_view(&node).await),
        report(
            "memory-limit-below-usage",
            checks::limit_below_usage(&node).await,
        ),
        report("pod-memory-limit", checks::pod_memory(&node).await),
        report("exit-reasons", checks::exit_reasons(&node).await),
        report("cpu-limit", checks::cpu_limit(&node).await),
        report("process-limit", checks::process_limit(&node).await),
        report("killed-sandbox", checks::killed_sandbox(&node).await),
        report(
            "cgroups-are-removed",
            checks::cgroups_are_removed(&node).await,
        ),
        report("without-cgroups", checks::without_cgroups(&node).await),
        report(
            "node-root-is-inaccessible",
            checks::node_root_is_inaccessible(&node).await,
        ),
    ];
    drop(node);
    results.iter().all(|passed| *passed)
}

fn report(name: &str, result: CheckResult) -> bool {
    match &result {
        Ok(summary) => print_line(&format!("ok {name}: {summary}")),
        Err(reason) => print_line(&format!("FAILED {name}: {reason}")),
    }
    result.is_ok()
}

fn print_line(line: &str) {
    let mut out = std::io::stdout().lock();
    // Ignore errors: there is no other place to report them.
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
