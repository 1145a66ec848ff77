//! Streams into pods with the current kubectl: exec, attach, cp, port-forward, debug.

use std::time::Duration;

use e2e::{
    BUSYBOX, Lab, TestCluster, WAIT_FOR_SIGTERM, eventually, pod, script_container, script_pod,
    wait_until, with_open_input,
};
use serde_json::json;

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

#[track_caller]
fn cluster(lab: &Lab, user: &str) -> TestCluster {
    lab.load_busybox_for(user);
    let mut cluster = TestCluster::start_as(lab, user, ONE);
    // The directory of a test's files, and of tmux's socket.
    cluster.shell("rm -rf /tmp/streams-$USER; mkdir /tmp/streams-$USER");
    cluster
}

#[track_caller]
fn clean_up(lab: &Lab, mut cluster: TestCluster) {
    cluster.shell("rm -rf /tmp/streams-$USER");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// A script that runs in the directory of the test's files.
fn in_test_dir(script: &str) -> String {
    format!("cd /tmp/streams-$USER; set -o pipefail; {script}")
}

#[test]
fn exec_runs_commands_in_containers() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let env = json!({"env": [{"name": "MINE", "value": "yes"}], "workingDir": "/var"});
    let other = json!({"securityContext": {"runAsUser": 1000, "runAsGroup": 2000, "allowPrivilegeEscalation": false}});
    cluster.create_running(&[
        script_pod("p", WAIT_FOR_SIGTERM, env),
        script_pod("q", WAIT_FOR_SIGTERM, other),
        pod(
            "two",
            json!({"shareProcessNamespace": true}),
            &[
                script_container("a", WAIT_FOR_SIGTERM, json!({})),
                script_container("b", WAIT_FOR_SIGTERM, json!({})),
            ],
        ),
    ]);

    // Streams, exit codes, error messages.
    let cases = [
        ("kubectl exec p -- echo hello", 0, "hello"),
        (
            "kubectl exec p -- sh -c 'echo $MINE $HOME; pwd'",
            0,
            "yes /root\n/var",
        ),
        (
            "kubectl exec p -- sh -c 'exit 7' 2>&1",
            7,
            "command terminated with exit code 7",
        ),
        (
            "kubectl exec p -- sh -c 'kill -TERM $$' 2>&1",
            143,
            "command terminated with exit code 143",
        ),
        (
            "kubectl exec p -- sh -c 'echo out; echo err >&2' 2>/dev/null",
            0,
            "out",
        ),
        (
            "kubectl exec p -- sh -c 'echo out; echo err >&2' 2>&1 >/dev/null",
            0,
            "err",
        ),
        ("echo text | kubectl exec -i p -- cat", 0, "text"),
        ("echo text | kubectl exec p -- cat", 0, ""),
        ("printf 'b\\na\\n' | kubectl exec -i p -- sort", 0, "a\nb"),
        ("kubectl exec p -- sh -c 'sleep 100 & echo done'", 0, "done"),
        (
            "kubectl exec q -- sh -c 'id -u; id -g; echo again > /dev/stdout; grep NoNewPrivs /proc/self/status'",
            0,
            "1000\n2000\nagain\nNoNewPrivs:\t1",
        ),
        (
            "kubectl exec two -c b -- sh -c 'ps | grep -c \"[s]leep 1000\"'",
            0,
            "4",
        ),
        (
            "kubectl exec deploy/none -- true 2>&1 | grep -c NotFound",
            0,
            "1",
        ),
    ];
    for (command, code, text) in cases {
        assert_eq!(
            cluster.try_shell(command),
            (code, text.to_owned()),
            "{command}"
        );
    }
    let (code, text) = cluster.try_shell("kubectl exec p -- nope");
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("Internal error occurred"), "{text}");
    assert!(
        text.contains(r#"exec: "nope": executable file not found in $PATH"#),
        "{text}"
    );
    let (code, text) = cluster.try_shell("kubectl exec p -c other -- true");
    assert_eq!(code, 1, "{text}");
    clean_up(&lab, cluster);
}

#[test]
fn large_streams_arrive_completely() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    cluster.create_running(&[script_pod("p", WAIT_FOR_SIGTERM, json!({}))]);
    let sum = cluster.shell(&in_test_dir(
        "head -c 67108864 /dev/urandom > file && sha256sum < file",
    ));
    for command in [
        "kubectl exec -i p -- sh -c 'cat > /tmp/file; sha256sum < /tmp/file' < file",
        "kubectl exec p -- cat /tmp/file | sha256sum",
        "kubectl exec -i p -- cat < file | sha256sum",
        // A reader that starts late.
        "kubectl exec p -- cat /tmp/file | { sleep 2; sha256sum; }",
        "kubectl cp file p:/tmp/copy && kubectl cp p:/tmp/copy back >&2 && sha256sum < back",
    ] {
        let (code, text) = cluster.try_shell(&in_test_dir(&format!(
            "{{ {command}; }} 2> errors || cat errors"
        )));
        assert_eq!((code, text), (0, sum.clone()), "{command}");
    }
    cluster.shell(&in_test_dir(
        "mkdir -p dir/sub && echo x > dir/sub/x && ln -s sub dir/link && kubectl cp dir p:/tmp/",
    ));
    let copied = cluster.shell("kubectl exec p -- sh -c 'cat /tmp/dir/sub/x'");
    assert_eq!(copied, "x");
    clean_up(&lab, cluster);
}

#[test]
fn exec_handles_parallel_commands_and_lost_clients() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    cluster.create_running(&[
        script_pod("p", WAIT_FOR_SIGTERM, json!({})),
        script_pod("dies", WAIT_FOR_SIGTERM, json!({})),
    ]);
    let counted = cluster.shell(
        "for i in $(seq 50); do kubectl exec p -- sh -c \"sleep 2; echo $i\" & done | sort -n | uniq | wc -l; wait",
    );
    assert_eq!(counted, "50");

    // Without a terminal, a command continues after its client has disconnected.
    cluster.try_shell(
        "timeout --signal=KILL 2 kubectl exec p -- sh -c 'sleep 4; echo much; touch /tmp/went-on'",
    );
    wait_until(20, "the command went on", || {
        cluster
            .try_shell("kubectl exec p -- test -e /tmp/went-on")
            .0
            == 0
    });
    // A command that reads until end-of-file exits when kubectl's input ends.
    let (code, text) = cluster.try_shell("timeout 20 kubectl exec -i p -- cat < /dev/null");
    assert_eq!((code, text), (0, String::new()));

    let (code, text) = cluster.try_shell(&in_test_dir(
        "kubectl exec dies -- sh -c 'echo started; sleep 1000' > out 2>&1 & until grep started out; do sleep 0.1; done; \
         kubectl exec dies -- kill 1; wait $!; code=$?; cat out; exit $code",
    ));
    assert_eq!(code, 137, "{text}");
    assert!(
        text.contains("command terminated with exit code 137"),
        "{text}"
    );
    let (code, text) = cluster.try_shell("kubectl exec dies -- true");
    assert_eq!(code, 1, "{text}");
    clean_up(&lab, cluster);
}

/// The screen of a terminal in tmux.
struct Screen<'a> {
    cluster: &'a mut TestCluster,
}

const TMUX: &str = "cd /tmp/streams-$USER && tmux -S /tmp/streams-$USER/tmux";

impl<'a> Screen<'a> {
    #[track_caller]
    fn new(cluster: &'a mut TestCluster, command: &str) -> Self {
        cluster.shell(&format!(
            "{TMUX} -f /dev/null new-session -d -x 100 -y 30 \"{command}; sleep 1000\" \\; set-option -g status off"
        ));
        Self { cluster }
    }

    #[track_caller]
    fn keys(&mut self, keys: &str) {
        self.cluster.shell(&format!("{TMUX} send-keys {keys}"));
    }

    #[track_caller]
    fn wait_for_text(&mut self, text: &str) {
        let mut seen = String::new();
        let shown = eventually(Duration::from_secs(20), || {
            seen = self.cluster.shell(&format!("{TMUX} capture-pane -p"));
            seen.contains(text).then_some(())
        });
        assert!(
            shown.is_some(),
            "the terminal never showed {text:?}:\n{seen}"
        );
    }

    /// The shell gets the terminal's size, and its changes.
    #[track_caller]
    fn assert_size_is_passed_on(&mut self) {
        self.keys("'stty size' Enter");
        self.wait_for_text("\n30 100\n");
        self.cluster
            .shell(&format!("{TMUX} resize-window -x 120 -y 40"));
        self.keys("'until stty size | grep 40.120; do sleep 0.1; done' Enter");
        self.wait_for_text("\n40 120\n");
    }

    #[track_caller]
    fn close(self) {
        self.cluster.shell(&format!("{TMUX} kill-server"));
    }
}

#[test]
fn terminals_support_size_signals_and_hangup() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let other = json!({"securityContext": {"runAsUser": 1000}});
    cluster.create_running(&[
        script_pod("p", WAIT_FOR_SIGTERM, json!({})),
        script_pod("q", WAIT_FOR_SIGTERM, other),
    ]);
    let mut screen = Screen::new(&mut cluster, "kubectl exec -it p -- sh");
    screen.keys("'tty; echo $TERM' Enter");
    screen.wait_for_text("\n/dev/pts/0\nxterm");
    screen.assert_size_is_passed_on();
    // Ctrl-C ends the foreground command, but not the shell.
    screen.keys("'sleep 1000' Enter");
    screen.keys("C-c");
    screen.keys("'echo code $?' Enter");
    screen.wait_for_text("code 130");
    screen.keys("'vi /tmp/x' Enter");
    screen.wait_for_text("- /tmp/x");
    screen.keys("'ihello from vi'");
    screen.wait_for_text("hello from vi");
    // Send Escape alone: otherwise it would be taken for the start of an escape sequence.
    screen.keys("Escape");
    screen.wait_for_text("[Modified]");
    screen.keys("':wq' Enter");
    screen.wait_for_text("#");
    screen.keys("'clear; tr a-z A-Z < /tmp/x' Enter");
    screen.wait_for_text("HELLO FROM VI");
    screen.keys("top Enter");
    screen.wait_for_text("Load average");
    screen.keys("q");
    screen.keys("'exit 3' Enter");
    screen.wait_for_text("command terminated with exit code 3");
    screen.close();

    // SPDY has a separate stream for the size.
    let mut screen = Screen::new(
        &mut cluster,
        "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false kubectl exec -it p -- sh",
    );
    screen.assert_size_is_passed_on();
    screen.keys("'exit 5' Enter");
    screen.wait_for_text("command terminated with exit code 5");
    screen.close();

    // The container's user owns the terminal, and the loss of the client sends SIGHUP.
    let mut screen = Screen::new(&mut cluster, "kubectl exec -it q -- sh");
    screen.keys("'echo mine > $(tty); sleep 4321' Enter");
    screen.wait_for_text("\nmine");
    let count = "kubectl exec q -- sh -c 'ps | grep -c \"[s]leep 4321\"'";
    wait_until(20, "the terminal's command runs", || {
        screen.cluster.try_shell(count) == (0, "1".to_owned())
    });
    screen.close();
    wait_until(20, "the terminal's processes have exited", || {
        cluster.try_shell(count).1.starts_with('0')
    });
    clean_up(&lab, cluster);
}

#[test]
fn clients_attach_to_containers() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let reads = "while read line; do echo got $line; done; echo end; exit 4";
    let once = json!({"stdin": true, "stdinOnce": true});
    cluster.create_running(&[
        script_pod("once", reads, once),
        script_pod("always", reads, json!({"stdin": true})),
        script_pod("prints", "while sleep 0.2; do echo tick; done", json!({})),
    ]);
    // The client's input is the container's, including its end.
    let (code, text) =
        cluster.try_shell("printf 'one\\ntwo\\n' | timeout 20 kubectl attach -i once");
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("got one\ngot two\nend"), "{text}");
    wait_until(20, "the container has ended", || {
        cluster.shell("kubectl get pod once --output=jsonpath={.status.containerStatuses[0].state.terminated.exitCode}") == "4"
    });
    assert_eq!(cluster.shell("kubectl logs once"), "got one\ngot two\nend");

    // Without stdinOnce, the container waits for the next client.
    for input in ["one", "two"] {
        let (_, text) = cluster.try_shell(&format!(
            "{{ echo {input}; sleep 1; }} | timeout 20 kubectl attach -i always"
        ));
        assert!(text.contains(&format!("got {input}")), "{text}");
    }
    assert_eq!(cluster.shell("kubectl logs always"), "got one\ngot two");

    // Two clients at once.
    let text = cluster.shell(&in_test_dir(
        "timeout 3 kubectl attach prints > one 2> /dev/null & timeout 3 kubectl attach prints > two 2> /dev/null & wait; grep -c tick one two",
    ));
    for line in text.lines() {
        let count: u32 = line.rsplit(':').next().unwrap().parse().unwrap();
        assert!(count > 3, "{text}");
    }

    let (code, text) = cluster.try_shell(&format!(
        "echo x | timeout 50 kubectl run -i --rm --restart=Never --quiet cat --image={BUSYBOX} -- cat"
    ));
    assert_eq!((code, text), (0, "x".to_owned()));
    let (code, text) = cluster.try_shell(&format!(
        "timeout 50 kubectl run -i --rm --restart=Never --quiet fails --image={BUSYBOX} -- sh -c 'sleep 1; exit 9'"
    ));
    assert_eq!(code, 9, "{text}");
    clean_up(&lab, cluster);
}

#[test]
fn short_container_output_is_seen_once() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    // The container ends before kubectl attaches to it, at about the same time, or later.
    let runs = 24;
    let run = format!(
        "run() {{ timeout 50 kubectl run -i --rm --restart=Never --quiet short-$1 --image={BUSYBOX} -- \
           sh -c \"echo one; echo two >&2; sleep 0.$(printf %03d $((($1 - 1) * 12))); echo three\" > short-$1.out 2>&1; }}"
    );
    let all = format!(
        "{run}; for first in $(seq 1 4 {runs}); do for i in $(seq $first $((first + 3))); do run $i & done; wait; done; \
         for i in $(seq {runs}); do sort short-$i.out | tr '\\n' ' '; echo; done"
    );
    let text = cluster.shell(&in_test_dir(&all));
    assert_eq!(text.lines().count(), runs, "{text}");
    for line in text.lines() {
        assert_eq!(line.trim(), "one three two", "{text}");
    }

    // A container that starts later.
    let mut pod = script_pod("later", "echo first; sleep 1; echo last", json!({}));
    pod["spec"]["restartPolicy"] = json!("Never");
    let mut init = pod["spec"]["containers"][0].clone();
    init["name"] = json!("init");
    init["command"] = json!(["sleep", "3"]);
    pod["spec"]["initContainers"] = json!([init]);
    cluster.create_objects(&[pod]);
    cluster.shell("kubectl wait pod/later --for=jsonpath={.status.initContainerStatuses[0].state.running} --timeout=20s");
    let text = cluster.shell("timeout 50 kubectl attach --quiet later -c main 2> /dev/null");
    assert_eq!(text, "first\nlast");

    // Without a log that was just read, there is nothing to continue.
    cluster.shell("kubectl wait pod/later --for=jsonpath={.status.phase}=Succeeded --timeout=20s");
    let (code, text) = cluster.try_shell("timeout 20 kubectl attach --quiet later -c main");
    assert_eq!(code, 1, "{text}");
    clean_up(&lab, cluster);
}

#[test]
fn slow_client_does_not_block_its_container() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let writes = "sleep 4; yes 0123456789012345678901234567890123456789 | head -c 200000000; echo done; exit 0";
    cluster.create_running(&[script_pod("writes", writes, json!({}))]);
    let text = cluster.shell(
        "kubectl attach writes | sleep 30 & \
         kubectl wait pod/writes --for=jsonpath={.status.phase}=Succeeded --timeout=25s && kubectl logs writes --tail=1",
    );
    assert!(text.ends_with("done"), "{text}");
    clean_up(&lab, cluster);
}

#[test]
fn kubectl_run_has_a_terminal() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let run = format!("kubectl run -it --rm shell --restart=Never --image={BUSYBOX} -- sh");
    let mut screen = Screen::new(&mut cluster, &run);
    screen.wait_for_text("#");
    screen.keys("'echo $((40 + 2))' Enter");
    screen.wait_for_text("\n42\n");
    screen
        .cluster
        .shell(&format!("{TMUX} resize-window -x 90 -y 20"));
    screen.keys("'sleep 0.5; stty size' Enter");
    screen.wait_for_text("20 90");
    screen.keys("'exit' Enter");
    screen.wait_for_text("pod \"shell\" deleted");
    screen.close();
    clean_up(&lab, cluster);
}

#[test]
fn ports_are_forwarded() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    let servers = "mkdir /www; head -c 50000000 /dev/urandom > /www/file; sha256sum < /www/file | cut -c1-64 > /www/sum; \
        while true; do nc -l -p 9000 -e wc -c; done & httpd -f -p 127.0.0.1:8080 -h /www";
    cluster.create_running(&[script_pod("p", servers, json!({}))]);
    wait_until(20, "the web server responds", || {
        cluster
            .try_shell("kubectl exec p -- wget -qO- http://127.0.0.1:8080/sum")
            .0
            == 0
    });
    let with_port = |port: u16, script: &str| {
        in_test_dir(&format!(
            "rm -f ports; kubectl port-forward pod/p :{port} > ports 2> errors & forward=$!; \
             until grep -qs Forwarding ports; do sleep 0.1; kill -0 $forward || exit 9; done; \
             port=$(sed -n 's/.*127.0.0.1:\\([0-9]*\\) .*/\\1/p' ports); \
             {{ {script}; }}; code=$?; kill $forward; wait $forward; exit $code"
        ))
    };
    let (code, text) = cluster.try_shell(&with_port(
        8080,
        "curl -sS http://127.0.0.1:$port/sum > sum && curl -sS http://127.0.0.1:$port/file | sha256sum | cut -c1-64 | diff - sum",
    ));
    assert_eq!(code, 0, "{text}");
    let (code, text) = cluster.try_shell(&with_port(
        8080,
        "for i in $(seq 20); do curl -sS http://127.0.0.1:$port/sum & done | uniq | wc -l",
    ));
    assert!(code == 0 && text.trim_end().ends_with('1'), "{text}");
    // The client's end-of-file is passed on, and later output still arrives.
    let (code, text) = cluster.try_shell(&with_port(
        9000,
        "head -c 30000000 /dev/zero | socat -t 20 - TCP:127.0.0.1:$port",
    ));
    assert!(code == 0 && text.contains("30000000"), "{text}");
    let (_, text) = cluster.try_shell(&with_port(
        81,
        "curl -sS http://127.0.0.1:$port/; sleep 1; cat errors",
    ));
    assert!(text.contains("connection refused"), "{text}");
    clean_up(&lab, cluster);
}

#[test]
fn pods_and_nodes_can_be_debugged() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user1");
    cluster.create_running(&[script_pod("p", "sleep 5678", json!({}))]);
    // It can see the container's processes and, through them, its files.
    let (code, text) = cluster.try_shell(&format!(
        "timeout 50 kubectl debug p --quiet -i --image={BUSYBOX} --target=main -- sh -c 'ps; ls /proc/1/root/bin/busybox; hostname'"
    ));
    assert_eq!(code, 0, "{text}");
    for expected in ["sleep 5678", "/proc/1/root/bin/busybox", "\np"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let names = cluster
        .shell("kubectl get pod p --output=jsonpath={.status.ephemeralContainerStatuses[*].state}");
    assert!(names.contains("exitCode\":0"), "{names}");

    let run = format!("kubectl debug p -it --image={BUSYBOX} --target=main -- sh");
    let mut screen = Screen::new(&mut cluster, &run);
    screen.wait_for_text("#");
    screen.keys("'echo $((40 + 2))' Enter");
    screen.wait_for_text("\n42\n");
    screen.keys("'exit' Enter");
    screen.close();

    let node = cluster.shell("kubectl get nodes --output=jsonpath={.items[0].metadata.name}");
    let run = format!("kubectl debug node/{node} -it --image={BUSYBOX} -- sh");
    let mut screen = Screen::new(&mut cluster, &run);
    screen.wait_for_text("#");
    // The node's files, processes and name.
    screen.keys("'chroot /host /bin/sh -c \"hostname; id -u; ls -d /home/user1; ps -e | grep -q slurmstepd && echo steps\"' Enter");
    screen.wait_for_text(&format!("\n{node}\n0\n/home/user1\nsteps\n"));
    screen.keys("'exit' Enter");
    screen.close();
    assert_node_debugger_has_rights_of(&mut cluster, "user1");
    cluster.shell("kubectl delete pod --all --force --grace-period=0 --wait=false");
    clean_up(&lab, cluster);
}

/// The debug container can see all processes and write the user's files, but cannot read files that only root may.
#[track_caller]
fn assert_node_debugger_has_rights_of(cluster: &mut TestCluster, user: &str) {
    let node = cluster.first_node();
    // Its script waits until the client is attached.
    let debug = format!(
        "timeout 50 kubectl debug node/{node} --quiet -i --image={BUSYBOX} -- sh -c '\
         read begin; ps | grep -q \"[s]lurmstepd\" && echo steps; \
         head -c 1 /host/etc/passwd > /dev/null && echo passwd; head -c 1 /host/etc/shadow; \
         chroot /host /bin/sh -c \"ps -e | grep -q slurmstepd && echo steps again; head -c 1 /etc/shadow; \
         touch /home/{user}/debugged && echo touched\"'"
    );
    let (code, text) = cluster.try_shell(&with_open_input("begin", &debug));
    assert_eq!(code, 0, "{text}");
    for expected in ["steps\n", "passwd\n", "steps again\n", "touched"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(text.matches("ermission denied").count(), 2, "{text}");
    let owner = cluster.shell("stat --format=%U:%G ~/debugged && rm ~/debugged");
    assert_eq!(owner, format!("{user}:{user}"));
}

#[test]
fn streams_work_with_a_single_id() {
    let lab = Lab::acquire();
    let mut cluster = cluster(&lab, "user2");
    let other = json!({"securityContext": {"runAsUser": 1000}});
    cluster.create_running(&[
        script_pod("p", WAIT_FOR_SIGTERM, json!({})),
        script_pod("q", WAIT_FOR_SIGTERM, other),
    ]);
    let cases = [
        ("kubectl exec p -- id -u", "0"),
        ("kubectl exec q -- id -u", "1000"),
        ("echo text | kubectl exec -i q -- cat", "text"),
        ("kubectl exec q -- sh -c 'echo x > /dev/stdout'", "x"),
        (
            "script --quiet --return --command 'kubectl exec -it q -- sh -c tty' /dev/null",
            "/dev/pts/0",
        ),
        (
            "script --quiet --return --command 'kubectl exec -it p -- sh -c tty' /dev/null",
            "/dev/pts/0",
        ),
    ];
    for (command, text) in cases {
        let (code, output) = cluster.try_shell(command);
        // script(1) may echo the end of its own input, before or after the output.
        let output = output.trim_matches(|c: char| c.is_whitespace() || "^@".contains(c));
        assert_eq!((code, output), (0, text), "{command}");
    }
    assert_node_debugger_has_rights_of(&mut cluster, "user2");
    cluster.shell("kubectl delete pod --all --force --grace-period=0 --wait=false");
    clean_up(&lab, cluster);
}
