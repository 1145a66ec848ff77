//! Tries limits for real, on a kernel that lets an ordinary user have control groups (tests/qemu/run).
//!
//! It plays the kubelet of one node: divides the control group that it was started in, starts the real `coracle internal hub` and one
//! `coracle internal sandbox` for each pod, tells them what to run, and looks at what the kernel did. One line for each check, and a
//! verdict, go to the console, where tests/tests/cgroups.rs reads them.

mod checks;
mod node;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use linux::cgroup::Division;

/// What killed processes may take to be gone.
const LAST_BREATH: Duration = Duration::from_secs(5);

/// What every check returns: what was seen, or what was wrong.
type Seen = Result<String, String>;

fn main() -> ExitCode {
    // As the agent's guard does it.
    if let Err(error) = linux::process::become_subreaper() {
        say(&format!("orphans are lost: {error}"));
    }
    let division = match linux::cgroup::divide("coracle-node", "coracle-pods") {
        Ok(division) => division,
        Err(error) => {
            say(&format!(
                "VERDICT failed: {error}: {:?}",
                std::error::Error::source(&error)
            ));
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let good = match runtime {
        Ok(runtime) => runtime.block_on(try_all(&division)),
        Err(error) => {
            say(&format!("no runtime: {error}"));
            false
        }
    };
    if let Err(error) = linux::process::kill_all_below(LAST_BREATH) {
        say(&format!("something is left: {error}"));
    }
    division.end();
    let good = report("the-group-is-given-back", checks::given_back()) && good;
    say(if good { "VERDICT ok" } else { "VERDICT failed" });
    ExitCode::from(u8::from(!good))
}

async fn try_all(division: &Division) -> bool {
    let node = match node::Node::start(division.theirs().clone()).await {
        Ok(node) => node,
        Err(problem) => return report("node", Err(problem)),
    };
    let results = [
        report("a-container-beyond-its-memory", checks::memory(&node).await),
        report("what-a-container-sees", checks::view(&node).await),
        report(
            "less-memory-than-is-in-use",
            checks::less_memory(&node).await,
        ),
        report("a-pod-beyond-its-memory", checks::pod_memory(&node).await),
        report("other-ends-are-told-apart", checks::other_ends(&node).await),
        report("processors", checks::processors(&node).await),
        report("processes", checks::processes(&node).await),
        report("a-killed-sandbox", checks::killed_sandbox(&node).await),
        report("groups-are-removed", checks::removed(&node).await),
        report("without-groups", checks::without_groups(&node).await),
        report(
            "the-nodes-root-stays-out-of-reach",
            checks::node_root(&node).await,
        ),
    ];
    drop(node);
    results.iter().all(|good| *good)
}

fn report(name: &str, seen: Seen) -> bool {
    match &seen {
        Ok(words) => say(&format!("ok {name}: {words}")),
        Err(words) => say(&format!("FAILED {name}: {words}")),
    }
    seen.is_ok()
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A console that is gone has nobody to tell.
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}
