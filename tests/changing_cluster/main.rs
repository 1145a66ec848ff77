//! A cluster whose nodes change: `changing-cluster WORKLOAD [ARGS]...`, called on the first node of a job.
//!
//! The cluster begins with that node alone. Each line that is written to the named pipe `$MEMBERSHIP` adds a node of the job or removes
//! one: `add node2`, `remove node2`. The cluster ends with the workload.
//!
//! `cluster` starts its processes as roles of the running program. They are those of `coracle`, which this program executes for them.

#![allow(
    clippy::unwrap_used,
    reason = "this is a program of the tests, whose output they read"
)]

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::time::Duration;

use cluster::{
    Cluster, ClusterEnd, ClusterKeys, ClusterMembership, ClusterOptions, ClusterStorage,
    WORKLOAD_MARK,
};
use console::Phases;
use releases::Release;
use slurm::{Allocation, Slurm};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::unix::pipe;

const START_TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args[0] == "internal" {
        let error = std::process::Command::new("coracle").args(&args).exec();
        panic!("cannot execute coracle: {error}");
    }
    rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .unwrap();
    // Children get a signal when the thread dies that has started them.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run(&args));
}

async fn run(workload: &[String]) {
    let slurm = Slurm::find().unwrap();
    let mut allocation = Allocation::from_process_env().unwrap().unwrap();
    allocation.nodes.truncate(1);
    let release = Release::find(None).unwrap();
    let mut phases = Phases::new();
    let options = options();
    let seed = cluster::ensure_seed(&release, &options.service_cidr, &mut phases).await;
    let launched = Cluster::launch(&options, &allocation, &release, seed, slurm.clone());
    let mut cluster = launched.await.unwrap();
    let ready = cluster.wait_until_ready(START_TIMEOUT, true, &mut phases);
    ready.await.unwrap();

    let pipe_path = PathBuf::from(std::env::var_os("MEMBERSHIP").unwrap());
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe_path, mode).unwrap();
    // Also open for writing: there is no end of file when a writer closes it.
    let pipe = pipe::OpenOptions::new()
        .read_write(true)
        .open_receiver(&pipe_path)
        .unwrap();
    let mut lines = BufReader::new(pipe).lines();
    let dir = cluster.control_plane_dir().unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut child = tokio::process::Command::new(&workload[0])
        .args(&workload[1..])
        .env("KUBECONFIG", dir.kubeconfig())
        .env("KUBECACHEDIR", dir.cache())
        .env("PATH", format!("{}:{path}", dir.programs().display()))
        .env(WORKLOAD_MARK, &cluster.mark)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let code = loop {
        tokio::select! {
            status = child.wait() => break status.unwrap().code().unwrap_or(1),
            line = lines.next_line() => {
                let line = line.unwrap().unwrap();
                let (action, node) = line.split_once(' ').unwrap();
                let changed = match action {
                    "add" => {
                        let detail = slurm.job_detail(allocation.job_id).await.unwrap();
                        cluster.add_nodes(vec![node.to_owned()], &detail)
                    }
                    "remove" => cluster.remove_node(node),
                    other => panic!("unknown action {other}"),
                };
                changed.unwrap();
            }
            end = cluster.watch() => match end {
                ClusterEnd::JobEnded => break 1,
                ClusterEnd::ControlPlaneFailed(failure) => panic!("{failure}"),
            },
        }
    };
    std::fs::remove_file(pipe_path).unwrap();
    cluster.stop(async {}).await;
    std::process::exit(code);
}

fn options() -> ClusterOptions {
    ClusterOptions {
        pod_cidr: "100.64.0.0/11".to_owned(),
        service_cidr: "100.96.0.0/16".to_owned(),
        api_port: 0,
        pods_as_steps: false,
        host_path_mappings: vec![],
        storage: ClusterStorage::Memory,
        keys: ClusterKeys::Generated,
        membership: ClusterMembership::Changing,
        has_program: true,
        verbose: false,
        log_dir: None,
    }
}
