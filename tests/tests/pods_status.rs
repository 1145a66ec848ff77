//! The status of pods: users, mounts, resources and resizes of containers, and that a status never goes backwards.

use std::collections::HashMap;

use e2e::{
    Lab, PodWatch, Role, TestCluster, condition, container_status, merged, pod, script_container,
    wait_until,
};
use serde_json::{Value, json};

const ONE: &[&str] = &["srun", "-N1", "coracle", "run"];

/// Runs until SIGTERM.
const UNTIL_SIGTERM: &str = "trap exit TERM; while true; do sleep 0.2; done";
/// Runs until SIGKILL.
const UNTIL_SIGKILL: &str = "trap '' TERM; while true; do sleep 0.2; done";

#[test]
fn status_has_users_mounts_and_resources() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let watch = cluster.watch_pods(&lab);
    let resources =
        json!({"requests": {"cpu": "50m", "memory": "16Mi"}, "limits": {"memory": "32Mi"}});
    let mounts = json!([
        {"name": "v", "mountPath": "/v"},
        {"name": "v", "mountPath": "/r", "readOnly": true, "recursiveReadOnly": "IfPossible"},
    ]);
    let context = json!({"runAsUser": 1000, "runAsGroup": 2000, "supplementalGroups": [3000], "fsGroup": 4000});
    cluster.create_objects(&[
        pod(
            "running",
            json!({"volumes": [{"name": "v", "emptyDir": {}}], "securityContext": context}),
            &[
                script_container(
                    "user",
                    UNTIL_SIGTERM,
                    json!({"resources": resources, "volumeMounts": mounts}),
                ),
                script_container(
                    "root",
                    UNTIL_SIGTERM,
                    json!({"securityContext": {"runAsUser": 0}}),
                ),
            ],
        ),
        pod(
            "completed",
            json!({"initContainers": [script_container("first", "true", json!({}))]}),
            &[script_container("main", "sleep 1", json!({}))],
        ),
    ]);
    cluster.wait_for("running", "condition=Ready");
    let running = cluster.pod("running");
    let user = container_status(&running, "user");
    let linux = &user["user"]["linux"];
    assert_eq!((&linux["uid"], &linux["gid"]), (&json!(1000), &json!(2000)));
    let groups = linux["supplementalGroups"].as_array().cloned();
    let mut groups = groups.unwrap_or_default();
    groups.sort_by_key(Value::as_u64);
    assert_eq!(groups, [2000, 3000, 4000], "{user:#}");
    assert_eq!(
        container_status(&running, "root")["user"]["linux"]["uid"],
        0
    );
    assert_eq!(user["resources"], resources);
    assert_eq!(user["allocatedResources"], resources["requests"]);
    let mounts = user["volumeMounts"].as_array().expect("mounts");
    let at = |path: &str| mounts.iter().find(|mount| mount["mountPath"] == path);
    assert_eq!(at("/v"), Some(&json!({"name": "v", "mountPath": "/v"})));
    assert_eq!(
        at("/r"),
        Some(
            &json!({"name": "v", "mountPath": "/r", "readOnly": true, "recursiveReadOnly": "Enabled"})
        )
    );
    assert_eq!(running["status"]["qosClass"], "Burstable");
    assert_eq!(
        running["status"]["observedGeneration"],
        running["metadata"]["generation"]
    );

    // All conditions of a completed pod.
    let completed = cluster.wait_for_phase("completed", "Succeeded");
    let all = |pod: &Value| {
        let kinds = [
            "PodScheduled",
            "PodReadyToStartContainers",
            "Initialized",
            "ContainersReady",
            "Ready",
        ];
        kinds.map(|kind| condition(pod, kind))
    };
    let done = "False PodCompleted";
    let no_sandbox = "False PodSandboxNotReady";
    assert_eq!(
        all(&completed),
        ["True", no_sandbox, "True PodCompleted", done, done]
    );
    let seen: Vec<_> = watch.states_of("completed").iter().map(all).collect();
    let (uninitialized, unready) = ("False ContainersNotInitialized", "False ContainersNotReady");
    for expected in [
        ["True", no_sandbox, uninitialized, unready, unready],
        ["True", "True", "True", "True", "True"],
    ] {
        assert!(seen.iter().any(|seen| *seen == expected), "{seen:#?}");
    }
    cluster.exit(0);
    lab.assert_nothing_left();
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\\\""))
}

/// A command that resizes the CPU requests of these containers, in thousandths.
fn resize_command(pod: &str, containers: &[&str], millis: u64) -> String {
    let each = containers.iter().map(
        |name| json!({"name": name, "resources": {"requests": {"cpu": format!("{millis}m")}}}),
    );
    let patch = json!({"spec": {"containers": each.collect::<Vec<_>>()}});
    let patch = quoted(&patch.to_string());
    format!("kubectl patch pod {pod} --subresource=resize --patch={patch}")
}

#[track_caller]
fn resize(cluster: &mut TestCluster, pod: &str, containers: &[&str], millis: u64) {
    cluster.shell(&resize_command(pod, containers, millis));
}

fn has_cpu(pod: &Value, name: &str, millis: u64) -> bool {
    let status = container_status(pod, name);
    let expected = format!("{millis}m");
    status["resources"]["requests"]["cpu"] == expected
        && status["allocatedResources"]["cpu"] == expected
        && status["state"]["running"].is_object()
}

#[test]
fn running_pods_are_resized() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(
        &lab,
        "user1",
        &["srun", "--overlap", "-N1", "coracle", "run"],
    );
    let watch = cluster.watch_pods(&lab);
    let resources = |cpu: &str| json!({"requests": {"cpu": cpu, "memory": "16Mi"}, "limits": {"memory": "32Mi"}});
    let resizable = |name: &str, policy: &str| {
        let policy = json!([{"resourceName": "cpu", "restartPolicy": policy}]);
        let script = "trap 'sleep 2; exit' TERM; while true; do sleep 0.2; done";
        script_container(
            name,
            script,
            json!({"resources": resources("50m"), "resizePolicy": policy}),
        )
    };
    let lasting = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 30});
    let names = ["goes-on", "restarts"];
    let containers = [
        resizable("goes-on", "NotRequired"),
        resizable("restarts", "RestartContainer"),
    ];
    let mut step = pod("step", lasting.clone(), &containers[..1]);
    step["metadata"]["annotations"] = json!({"coracle.dev/launcher": "step"});
    cluster.create_objects(&[pod("resized", lasting, &containers), step]);
    cluster.wait_for("resized", "condition=Ready");

    resize(&mut cluster, "resized", &names, 75);
    let resized = cluster.pod_until("resized", "has the new resources", |pod| {
        names.iter().all(|name| has_cpu(pod, name, 75))
            && container_status(pod, "restarts")["restartCount"] == 1
    });
    assert_eq!(
        container_status(&resized, "goes-on")["restartCount"],
        0,
        "{resized:#}"
    );
    assert_eq!(
        resized["spec"]["containers"][0]["resources"]["requests"]["cpu"],
        "75m"
    );
    // While one container is restarted for the resize, it is in progress; then it is complete.
    wait_until(20, "the resize is reported as in progress", || {
        let states = watch.states_of("resized");
        states
            .iter()
            .any(|pod| condition(pod, "PodResizeInProgress") == "True")
    });
    cluster.pod_until("resized", "the resize is complete", |pod| {
        condition(pod, "PodResizeInProgress").is_empty()
            && condition(pod, "PodResizePending").is_empty()
    });

    // The API server rejects more than the node has, and the node more than the pod's step has. The pod keeps its resources.
    let refused = cluster.try_shell(&resize_command("resized", &names, 500_000));
    assert!(
        refused.0 != 0
            && refused
                .1
                .contains("node didn't have enough allocatable resources: cpu"),
        "{refused:?}"
    );
    cluster.wait_for("step", "condition=Ready");
    resize(&mut cluster, "step", &["goes-on"], 75);
    let refused = cluster.pod_until("step", "reports an infeasible resize", |pod| {
        condition(pod, "PodResizePending") == "True Infeasible"
    });
    assert!(has_cpu(&refused, "goes-on", 50), "{refused:#}");
    cluster.shell("kubectl delete pod step");

    // A resize that needs another pod's resources is deferred.
    let node = cluster.json("get nodes");
    let cpus = node["items"][0]["status"]["allocatable"]["cpu"].clone();
    let cpus: u64 = cpus
        .as_str()
        .and_then(|cpus| cpus.parse().ok())
        .expect("a number");
    let hog = json!({"resources": resources(&format!("{}m", cpus * 700))});
    cluster.create_objects(&[pod(
        "hog",
        json!({}),
        &[script_container("c", UNTIL_SIGTERM, hog)],
    )]);
    cluster.wait_for("hog", "condition=Ready");
    resize(&mut cluster, "resized", &["goes-on"], cpus * 500);
    let waits = cluster.pod_until("resized", "defers the resize", |pod| {
        condition(pod, "PodResizePending") == "True Deferred"
    });
    assert!(has_cpu(&waits, "goes-on", 75), "{waits:#}");
    cluster.shell("kubectl delete pod hog");
    let resized = cluster.pod_until("resized", "has the freed resources", |pod| {
        has_cpu(pod, "goes-on", cpus * 500) && condition(pod, "PodResizePending").is_empty()
    });
    assert_eq!(
        container_status(&resized, "goes-on")["restartCount"],
        0,
        "{resized:#}"
    );
    assert_eq!(
        container_status(&resized, "restarts")["restartCount"],
        1,
        "{resized:#}"
    );
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// Inconsistencies between two consecutive statuses.
fn inconsistencies(before: &Value, now: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    let mut check = |holds: bool, problem: String| {
        if !holds {
            problems.push(problem);
        }
    };
    let rank = |pod: &Value| match pod["status"]["phase"].as_str() {
        Some("Running") => 1,
        Some("Succeeded" | "Failed") => 2,
        _ => 0,
    };
    let phases = [before, now].map(|pod| pod["status"]["phase"].to_string());
    check(
        rank(now) > rank(before) || phases[0] == phases[1],
        format!("phase {phases:?}"),
    );
    for field in ["startTime", "podIP", "hostIP", "qosClass"] {
        let [was, is] = [before, now].map(|pod| &pod["status"][field]);
        check(
            was.is_null() || was == is,
            format!("{field}: {was}, then {is}"),
        );
    }
    let generation = |pod: &Value| pod["status"]["observedGeneration"].as_u64();
    check(
        generation(now) >= generation(before),
        "generation".to_owned(),
    );
    for was in before["status"]["conditions"]
        .as_array()
        .into_iter()
        .flatten()
    {
        let kind = was["type"].as_str().unwrap_or_default();
        let mut all = now["status"]["conditions"].as_array().into_iter().flatten();
        let is = all.find(|is| is["type"] == kind).unwrap_or(&Value::Null);
        let since = |condition: &Value| condition["lastTransitionTime"].as_str().map(str::to_owned);
        check(since(is) >= since(was), format!("{was}, then {is}"));
        let same = was["status"] == is["status"];
        let stays = ["PodScheduled", "Initialized"].contains(&kind) && was["status"] == "True";
        check(same || !stays, format!("{was}, then {is}"));
        check(
            !same || since(is) == since(was),
            format!("{was}, then {is}"),
        );
    }
    for kind in ["initContainerStatuses", "containerStatuses"] {
        for was in before["status"][kind].as_array().into_iter().flatten() {
            let mut all = now["status"][kind].as_array().into_iter().flatten();
            let is = all
                .find(|is| is["name"] == was["name"])
                .unwrap_or(&Value::Null);
            let (restarted, counted) = (&is["restartCount"], &was["restartCount"]);
            check(
                restarted.as_u64() >= counted.as_u64(),
                format!("{was}, then {is}"),
            );
            let again = restarted.as_u64() > counted.as_u64();
            let ended = &was["state"]["terminated"];
            // A terminated container keeps that state until its restart, or waits with it as the last state.
            let kept =
                is["state"]["terminated"] == *ended || is["lastState"]["terminated"] == *ended;
            check(
                ended.is_null() || again || kept,
                format!("{was}, then {is}"),
            );
            let ran = was["state"]["running"].is_object();
            let waits =
                is["state"]["waiting"].is_object() && is["lastState"]["terminated"].is_null();
            check(!(ran && waits), format!("{was}, then {is}"));
            let id = |status: &Value| status["containerID"].as_str().map(str::to_owned);
            check(
                id(was).is_none() || id(is).is_some(),
                format!("{was}, then {is}"),
            );
        }
    }
    problems
}

#[track_caller]
fn assert_never_goes_backwards(watch: &PodWatch, name: &str) -> usize {
    let states = watch.states_of(name);
    let pairs = states.windows(2);
    let problems: Vec<_> = pairs
        .flat_map(|pair| inconsistencies(&pair[0], &pair[1]))
        .collect();
    assert!(problems.is_empty(), "{name}:\n{}", problems.join("\n"));
    states.len()
}

/// Watches pods of every kind from creation to completion, while their kubelet is killed twice.
#[test]
fn status_never_goes_backwards() {
    let lab = Lab::acquire();
    lab.load_busybox();
    lab.remove("out");
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let watch = cluster.watch_pods(&lab);
    let out = json!({"volumes": [{"name": "out", "hostPath": {"path": "/home/user1/out", "type": "DirectoryOrCreate"}},
        {"name": "v", "emptyDir": {}}]});
    let mounts = json!({"volumeMounts": [{"name": "out", "mountPath": "/out"}, {"name": "v", "mountPath": "/v"}]});
    let own = |script: &str| script_container("c", script, mounts.clone());
    let spec = |more: Value| merged(out.clone(), more);
    let until_go = "until test -e /out/go; do sleep 0.1; done";
    let init = merged(
        own("sleep 0.5; test -e /v/again || { touch /v/again; exit 2; }"),
        json!({"name": "init"}),
    );
    let side = merged(
        own(UNTIL_SIGTERM),
        json!({"name": "side", "restartPolicy": "Always"}),
    );
    let probe = json!({"readinessProbe": {"exec": {"command": ["sh", "-c", "test ! -e /out/unready"]}, "periodSeconds": 1, "failureThreshold": 1}});
    cluster.create_objects(&[
        pod(
            "succeeds",
            spec(json!({"initContainers": [side.clone()]})),
            &[own(until_go)],
        ),
        pod(
            "fails",
            spec(json!({})),
            &[own(&format!("{until_go}; exit 4"))],
        ),
        pod(
            "restarts-once",
            spec(json!({"restartPolicy": "OnFailure", "initContainers": [init, side]})),
            &[own(&format!(
                "{until_go}; test -e /v/c || {{ touch /v/c; exit 5; }}"
            ))],
        ),
        pod(
            "crashes",
            spec(json!({"restartPolicy": "Always"})),
            &[own("sleep 1; exit 1")],
        ),
        pod(
            "readiness-changes",
            spec(json!({"restartPolicy": "Always"})),
            &[merged(own(UNTIL_SIGTERM), probe)],
        ),
    ]);
    for name in ["succeeds", "fails", "restarts-once", "readiness-changes"] {
        cluster.wait_for(name, "condition=Ready");
    }
    let kill_agent = |cluster: &mut TestCluster| {
        let agent = lab.find("node1", Role::Agent);
        lab.kill("node1", "KILL", &agent);
        wait_until(30, "a new agent runs", || {
            lab.find("node1", Role::Agent).pid != agent.pid
        });
        wait_until(30, "the node is Ready", || cluster.has_ready_nodes(1));
    };
    kill_agent(&mut cluster);
    lab.sh("touch out/unready out/go").run().succeeded();
    cluster.wait_for("readiness-changes", "condition=Ready=False");
    kill_agent(&mut cluster);
    lab.sh("rm out/unready").run().succeeded();
    cluster.wait_for("readiness-changes", "condition=Ready");
    cluster.wait_for_phase("succeeds", "Succeeded");
    cluster.wait_for_phase("fails", "Failed");
    let again = cluster.wait_for_phase("restarts-once", "Succeeded");
    let counts: HashMap<_, _> = ["init", "side", "c"]
        .map(|name| (name, container_status(&again, name)["restartCount"].clone()))
        .into();
    assert_eq!(
        counts,
        HashMap::from([("init", json!(1)), ("side", json!(0)), ("c", json!(1))])
    );
    cluster.pod_until("crashes", "has restarted", |pod| {
        container_status(pod, "c")["restartCount"].as_u64() >= Some(2)
    });
    cluster.shell("kubectl delete pod readiness-changes crashes");
    for name in [
        "succeeds",
        "fails",
        "restarts-once",
        "crashes",
        "readiness-changes",
    ] {
        let states = assert_never_goes_backwards(&watch, name);
        assert!(states > 3, "{name}: only {states} states");
    }
    lab.remove("out");
    cluster.exit(0);
    lab.assert_nothing_left();
}

/// A minimal server of gRPC's health protocol: settings, and for each request headers, a message with this status, and trailers.
fn grpc_server(status: u32) -> String {
    let script = format!(
        r#"cat > /tmp/respond <<'END'
#!/bin/sh
printf '\000\000\000\004\000\000\000\000\000'
head -c 120 > /dev/null
printf '\000\000\024\001\004\000\000\000\001\210\017\020\020application/grpc'
printf '\000\000\007\000\000\000\000\000\001\000\000\000\000\002\010\00{status}'
printf '\000\000\017\001\005\000\000\000\001\000\013grpc-status\0010'
exec cat > /dev/null
END
chmod 755 /tmp/respond; trap exit TERM; nc -ll -p 5000 -e /tmp/respond & wait"#
    );
    // The API server would expand `$(…)` as a variable reference; `$$` escapes it.
    script.replace('$', "$$")
}

fn probe_pods() -> Vec<Value> {
    let with_probe = |status: u32, kind: &str| {
        let probe = json!({"grpc": {"port": 5000, "service": "some"}, "periodSeconds": 1, "failureThreshold": 2, "initialDelaySeconds": 1});
        script_container("c", &grpc_server(status), json!({kind: probe}))
    };
    let lasting = json!({"restartPolicy": "Always"});
    vec![
        pod("grpc", lasting.clone(), &[with_probe(1, "readinessProbe")]),
        pod(
            "grpc-unready",
            lasting.clone(),
            &[with_probe(2, "readinessProbe")],
        ),
        pod("grpc-dead", lasting, &[with_probe(2, "livenessProbe")]),
    ]
}

fn hook_pods() -> Vec<Value> {
    let server = r#"mkdir -p /v/www/cgi-bin; printf '#!/bin/sh\necho "$HTTP_X_VALUE $REQUEST_METHOD" > /v/requested; printf "Content-Type: text/plain\\r\\n\\r\\n"\n' > /v/www/cgi-bin/hook
        chmod 755 /v/www/cgi-bin/hook; trap exit TERM; httpd -f -p 8080 -h /v/www & wait"#;
    let mounts = json!({"volumeMounts": [{"name": "v", "mountPath": "/v"}]});
    let side = merged(
        script_container("side", server, mounts.clone()),
        json!({"restartPolicy": "Always", "startupProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1, "failureThreshold": 60}}),
    );
    let spec = json!({"volumes": [{"name": "v", "emptyDir": {}}], "initContainers": [side], "restartPolicy": "Always"});
    let hook = |more: Value| json!({"lifecycle": {"postStart": more}});
    let headers = json!([{"name": "X-Value", "value": "hello"}]);
    let get =
        hook(json!({"httpGet": {"port": 8080, "path": "/cgi-bin/hook", "httpHeaders": headers}}));
    let no_server = hook(json!({"httpGet": {"port": 8081, "path": "/none"}}));
    let waiting = "until test -e /v/requested; do sleep 0.1; done; cat /v/requested; trap exit TERM; while true; do sleep 0.2; done";
    let lasting = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 10});
    vec![
        pod(
            "hook-http",
            spec,
            &[merged(script_container("c", waiting, mounts), get)],
        ),
        pod(
            "hook-refused",
            lasting.clone(),
            &[script_container("c", UNTIL_SIGTERM, no_server)],
        ),
        pod(
            "hook-sleep",
            lasting,
            &[script_container(
                "c",
                UNTIL_SIGTERM,
                hook(json!({"sleep": {"seconds": 3}})),
            )],
        ),
    ]
}

/// Pods with a grace period of ten minutes, which is overridden.
fn grace_period_pods() -> Vec<Value> {
    let long = json!({"restartPolicy": "Always", "terminationGracePeriodSeconds": 600});
    let probe = json!({"exec": {"command": ["false"]}, "initialDelaySeconds": 1, "periodSeconds": 1, "failureThreshold": 1,
        "terminationGracePeriodSeconds": 1});
    let ignoring_sigterm = |more: Value| [script_container("c", UNTIL_SIGKILL, more)];
    vec![
        pod(
            "startup-grace",
            long.clone(),
            &ignoring_sigterm(json!({"startupProbe": probe})),
        ),
        pod(
            "liveness-grace",
            long.clone(),
            &ignoring_sigterm(json!({"livenessProbe": probe})),
        ),
        pod("deletion-grace", long.clone(), &ignoring_sigterm(json!({}))),
        pod("nearer-grace", long, &ignoring_sigterm(json!({}))),
    ]
}

#[test]
fn hooks_probes_and_grace_periods_work() {
    let lab = Lab::acquire();
    lab.load_busybox();
    let mut cluster = TestCluster::start_as(&lab, "user1", ONE);
    let watch = cluster.watch_pods(&lab);
    cluster.create_objects(&[probe_pods(), hook_pods(), grace_period_pods()].concat());

    cluster.wait_for("grpc", "condition=Ready");
    let unhealthy = "probe failed: service unhealthy (responded with \"NOT_SERVING\")";
    cluster.wait_for_event(
        "grpc-unready",
        &format!("Warning Unhealthy Readiness {unhealthy}"),
    );
    let unready = cluster.pod("grpc-unready");
    assert_eq!(condition(&unready, "Ready"), "False ContainersNotReady");
    assert_eq!(
        container_status(&unready, "c")["restartCount"],
        0,
        "{unready:#}"
    );
    cluster.wait_for_event(
        "grpc-dead",
        &format!("Warning Unhealthy Liveness {unhealthy}"),
    );
    let again = |pod: &Value| container_status(pod, "c")["restartCount"].as_u64() >= Some(1);
    cluster.pod_until("grpc-dead", "restarted", again);

    cluster.wait_for("hook-http", "condition=Ready");
    assert_eq!(cluster.logs("hook-http", "c"), "hello GET");
    cluster.wait_for_event(
        "hook-refused",
        "Warning FailedPostStartHook PostStartHook failed",
    );
    cluster.pod_until("hook-refused", "restarted", again);
    cluster.wait_for("hook-sleep", "condition=Ready");
    // The container is not ready before its postStart hook has completed.
    let started =
        container_status(&cluster.pod("hook-sleep"), "c")["state"]["running"]["startedAt"].clone();
    let ready = watch.states_of("hook-sleep").into_iter().find_map(|pod| {
        let all = pod["status"]["conditions"].as_array().cloned();
        let mut all = all.unwrap_or_default().into_iter();
        all.find(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    });
    let ready = ready.map(|ready| ready["lastTransitionTime"].clone());
    let clock = |time: &Value| {
        let text = time.as_str().unwrap_or_default().to_owned();
        let parts = text[11..19]
            .split(':')
            .map(|part| part.parse::<i64>().expect("a number"));
        parts.fold(0, |sum, part| sum * 60 + part)
    };
    let took = (clock(&ready.expect("it was ready")) - clock(&started)).rem_euclid(86_400);
    assert!((2..3600).contains(&took), "{took} s");

    for name in ["startup-grace", "liveness-grace"] {
        let pod = cluster.pod_until(name, "restarted", again);
        let last = &container_status(&pod, "c")["lastState"]["terminated"];
        assert_eq!(last["exitCode"], 137, "{pod:#}");
    }
    for name in ["deletion-grace", "nearer-grace"] {
        cluster.wait_for(name, "condition=Ready");
    }
    cluster.shell("kubectl delete pod nearer-grace --wait=false");
    let pod = cluster.pod("nearer-grace");
    assert_eq!(
        pod["metadata"]["deletionGracePeriodSeconds"], 600,
        "{pod:#}"
    );
    cluster.shell("kubectl delete pod nearer-grace deletion-grace --grace-period=1");
    cluster.exit(0);
    lab.assert_nothing_left();
}
