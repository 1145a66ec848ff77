//! The processes of a host, and the role of each within Coracle.

use crate::Lab;

/// A process as `ps` shows it, with its pid on the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its parent's pid.
    pub parent: u32,
    /// Its user.
    pub user: String,
    /// Its command line.
    pub args: String,
}

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// `coracle run`, the process that Slurm started.
    LeaderGuard,
    /// `coracle run` below its guard.
    LeaderWorker,
    /// `coracle internal control-plane`, outside of the control plane's namespaces.
    ControlPlaneOuter,
    /// `coracle internal control-plane`, the first process inside of them.
    ControlPlaneFirst,
    /// An upstream component, by name.
    Component(&'static str),
    /// The `srun` that starts the agents.
    AgentSrun,
    /// `coracle internal node`, the process that Slurm started.
    AgentGuard,
    /// `coracle internal node` below its guard.
    Agent,
    /// `coracle internal hub`, in the host's network.
    Hub,
    /// `coracle internal hub-inside`, in the namespaces of the pods.
    HubInside,
    /// `coracle internal janitor`.
    Janitor,
}

impl Lab {
    /// All processes of a host.
    pub fn processes(&self, host: &str) -> Vec<Process> {
        let listed = self.root(host, "ps -ww -eo pid=,ppid=,user:32=,args=");
        listed.stdout.lines().filter_map(parse).collect()
    }

    /// The processes of a user on a host.
    pub fn processes_of(&self, host: &str, user: &str) -> Vec<Process> {
        self.processes(host)
            .into_iter()
            .filter(|process| process.user == user)
            .collect()
    }

    /// The process of `user1` on `host` with this role; waits until it exists.
    #[track_caller]
    pub fn find(&self, host: &str, role: Role) -> Process {
        self.find_of(host, "user1", role)
    }

    /// The process of a user on `host` with this role; waits until it exists.
    #[track_caller]
    pub fn find_of(&self, host: &str, user: &str, role: Role) -> Process {
        let timeout = std::time::Duration::from_secs(10);
        let found = crate::eventually(timeout, || self.try_find(host, user, role));
        let Some(found) = found else {
            let processes = self.processes_of(host, user);
            panic!("no {role:?} of {user} on {host}: {processes:#?}");
        };
        found
    }

    /// The process of a user on `host` with this role, if it exists.
    pub fn try_find(&self, host: &str, user: &str, role: Role) -> Option<Process> {
        role.among(&self.processes_of(host, user))
    }

    /// The port of the leader's enrolment listener, on node1, to which the agent on another node is connected. The leader has other
    /// listeners too.
    pub fn enrolment_port(&self, node: &str, agent: &Process) -> String {
        let leader = self.find("node1", Role::LeaderWorker);
        let sockets = |host: &str, options: &str, owner: &Process, column: usize| -> Vec<String> {
            let listed = self.root(host, &format!("ss -H -t -n -p {options}")).stdout;
            let owner = format!("pid={},", owner.pid);
            let ports = listed.lines().filter(|line| line.contains(&owner));
            ports
                .filter_map(|line| line.split_whitespace().nth(column)?.rsplit(':').next())
                .map(str::to_owned)
                .collect()
        };
        let listening = sockets("node1", "-l", &leader, 3);
        let connected = sockets(node, "", agent, 4);
        let mut ports = listening
            .into_iter()
            .filter(|port| connected.contains(port));
        ports.next().expect("the agent is connected to the leader")
    }

    /// Sends a signal, by name, to a process on a host.
    pub fn kill(&self, host: &str, signal: &str, process: &Process) {
        // Ignore errors: the process may have exited.
        self.root(host, &format!("kill -{signal} {}", process.pid));
    }

    /// Whether a process still exists.
    pub fn is_alive(&self, host: &str, process: &Process) -> bool {
        self.processes(host).contains(process)
    }
}

impl Role {
    fn among(self, processes: &[Process]) -> Option<Process> {
        // With a space, so that one role's name may begin with that of another.
        let has = |process: &Process, args: &str| format!("{} ", process.args).contains(args);
        let parent = |process: &Process| processes.iter().find(|p| p.pid == process.parent);
        let child_of_same =
            |process: &Process, args: &str| parent(process).is_some_and(|p| has(p, args));
        let pair = |args: &str, child: bool| {
            let mut found = processes.iter().filter(|p| has(p, args) && runs_coracle(p));
            found.find(|p| child_of_same(p, args) == child)
        };
        let found = match self {
            Self::LeaderGuard => processes.iter().find(|p| {
                has(p, "coracle run ")
                    && runs_coracle(p)
                    && !child_of_same(p, "coracle run ")
                    && processes.iter().any(|c| c.parent == p.pid)
            }),
            Self::LeaderWorker => pair("coracle run ", true),
            Self::ControlPlaneOuter => pair("internal control-plane", false),
            Self::ControlPlaneFirst => pair("internal control-plane", true),
            Self::Component(name) => processes
                .iter()
                .find(|p| p.args.starts_with(&format!("/tmp/programs/{name} "))),
            Self::AgentSrun => processes.iter().find(|p| {
                has(p, "srun --jobid=")
                    && parent(p).is_some_and(|parent| has(parent, "coracle run "))
            }),
            Self::AgentGuard => pair("internal node", false),
            Self::Agent => pair("internal node", true),
            Self::Hub => pair("internal hub ", false),
            Self::HubInside => pair("internal hub-inside ", false),
            Self::Janitor => pair("internal janitor", false),
        };
        found.cloned()
    }
}

/// Excludes sruns, shells and commands of tests whose arguments merely contain the name of the program.
fn runs_coracle(process: &Process) -> bool {
    let program = process.args.split(' ').next().unwrap_or_default();
    program.ends_with("coracle") || program == "/proc/self/exe"
}

fn parse(line: &str) -> Option<Process> {
    let mut fields = line.split_whitespace();
    Some(Process {
        pid: fields.next()?.parse().ok()?,
        parent: fields.next()?.parse().ok()?,
        user: fields.next()?.to_owned(),
        args: fields.collect::<Vec<_>>().join(" "),
    })
}
