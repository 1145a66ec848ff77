//! Images: `coracle image …` as a user calls it, registries of all kinds, and what hostile layers can't do.

use e2e::{
    Call, Cluster, EMPTY_LAYER, Form, Lab, MIRROR, REGISTRY, Registry, TOKENS, container,
    eventually, looking, merged, pod, wait_until,
};
use serde_json::{Value, json};
use std::time::Duration;

/// In the home directory of `user1`: what a test needs, and a store of its own.
const DIR: &str = "images-test";

/// A lab without what a failed test may have left.
#[track_caller]
fn ready() -> Lab {
    let lab = Lab::ready();
    lab.remove(DIR);
    lab.remove(".docker");
    lab
}

fn says(text: &str) -> Value {
    json!({"Env": ["PATH=/bin"], "Cmd": ["echo", text]})
}

/// `coracle image …`, in [`DIR`] and with the store there.
fn image(lab: &Lab, words: &str) -> Call {
    shell(lab, &format!("coracle image {words}"))
}

fn shell(lab: &Lab, script: &str) -> Call {
    lab.sh(&format!(
        "mkdir -p ~/{DIR} && cd ~/{DIR} && export CORACLE_IMAGES=$PWD/store && set -o pipefail && {script}"
    ))
}

/// Writes an archive of one image, as `docker save` does.
#[track_caller]
fn archive(lab: &Lab, file: &str, name: &str, layer: &str) {
    let to = format!("{{ mkdir -p ~/{DIR} && cat > ~/{DIR}/{file}; }}");
    lab.archive(name, says(name), layer, &to);
}

#[track_caller]
fn listed(lab: &Lab, store: &str) -> Vec<String> {
    let listed = image(lab, &format!("ls --json --store {store}"));
    let all: Value = serde_json::from_str(&listed.run().succeeded().stdout).expect("JSON");
    let all = all.as_array().expect("a list").iter();
    all.map(|image| {
        assert_eq!(image["complete"], true, "{image}");
        image["reference"].as_str().expect("a name").to_owned()
    })
    .collect()
}

#[test]
fn archives_go_in_and_out() {
    let lab = ready();
    archive(&lab, "app.tar", "team/app:1", EMPTY_LAYER);
    let loaded = image(&lab, "load -i app.tar").run().succeeded();
    let id = loaded.stdout.trim().to_owned();
    assert!(id.starts_with("docker.io/team/app@sha256:"), "{loaded}");
    assert_eq!(loaded.stderr, "loaded docker.io/team/app:1\n");
    // Compressed or not, from a file or through a pipe: it is the same.
    for script in [
        "gzip < app.tar | coracle image load",
        "zstd --quiet app.tar && coracle image load -i app.tar.zst",
        "coracle image load < app.tar",
        "mkdir unpacked && tar --directory=unpacked --extract < app.tar && coracle image load -i unpacked",
    ] {
        shell(&lab, script).run().succeeded().printed(&id);
    }
    let other = id.replace("team/app", "other/name");
    image(&lab, "load -i app.tar --name other/name:2")
        .run()
        .succeeded()
        .printed(&other);
    let both = ["docker.io/other/name:2", "docker.io/team/app:1"];
    assert_eq!(listed(&lab, "store"), both);
    image(&lab, "ls")
        .run()
        .succeeded()
        .shows(&["IMAGE", "DIGEST", "SIZE", "USED", both[0], both[1]]);
    image(&lab, "ls | head -n 1").run().succeeded();

    // Out and in again. A pipe of data has nothing but data.
    for (format, file) in [("docker", "1.tar"), ("oci", "2.tar"), ("oci-dir", "3")] {
        let save = format!("save --format {format} team/app:1 other/name:2");
        let saved = image(&lab, &format!("{save} -o {file}")).run().succeeded();
        assert_eq!((saved.stdout.as_str(), saved.stderr.as_str()), ("", ""));
        if format != "oci-dir" {
            let same = format!(
                "{save} | cmp - {file} && coracle image {save} -o /dev/stdout | cmp - {file}"
            );
            let piped = image(&lab, &same).run().succeeded();
            assert_eq!(piped.stderr, "");
        }
        let load = format!("load -i {file} --store again-{format}");
        let again = image(&lab, &load).run().succeeded();
        let again: Vec<_> = again.stdout.lines().collect();
        assert_eq!(again, [id.as_str(), &other]);
        assert_eq!(listed(&lab, &format!("again-{format}")), both);
    }
    // What a list shows is what Docker reads, too.
    shell(&lab, "tar --extract --to-stdout --file=1.tar manifest.json")
        .run()
        .shows(&["\"RepoTags\":[\"docker.io/team/app:1\",\"docker.io/other/name:2\"]"]);

    // By age: what was used lately stays. That nobody asks a registry shows that there is none.
    let old = "touch -d '40 days ago' store/references/*";
    shell(&lab, old).run().succeeded();
    image(&lab, "pull --missing team/app:1")
        .run()
        .succeeded()
        .says(&["docker.io/team/app:1 is in the store"])
        .printed(&id);
    let prune = "prune --older-than 30d";
    image(&lab, &format!("{prune} --dry-run"))
        .run()
        .succeeded()
        .says(&["would have freed"])
        .printed(both[0]);
    assert_eq!(listed(&lab, "store"), both);
    image(&lab, prune).run().succeeded().printed(both[0]);
    assert_eq!(listed(&lab, "store"), both[1..]);
    // By size: the least recently used goes.
    let noise = "head -c 8M /dev/urandom > noise && tar --create noise";
    archive(&lab, "big.tar", "team/big:1", noise);
    image(&lab, "load -i big.tar").run().succeeded();
    shell(&lab, old).run().succeeded();
    image(&lab, "pull --missing team/app:1").run().succeeded();
    image(&lab, "prune --keep-bytes 6M")
        .run()
        .succeeded()
        .says(&["freed 8."])
        .printed("docker.io/team/big:1");
    // By name, or by what was printed for it.
    image(&lab, "load -i app.tar --name other/name:2")
        .run()
        .succeeded();
    image(&lab, "rm team/app:1")
        .run()
        .succeeded()
        .says(&["removed docker.io/team/app:1", "freed 0 B"]);
    image(&lab, &format!("rm {other}"))
        .run()
        .succeeded()
        .says(&[
            "removed docker.io/other/name@sha256:",
            ", and with it docker.io/other/name:2",
        ]);
    assert!(listed(&lab, "store").is_empty());
    shell(&lab, "find store/blobs store/partial -type f")
        .run()
        .succeeded()
        .printed("");
    lab.remove(DIR);
    lab.nothing_left();
}

#[test]
fn what_makes_no_sense_is_told() {
    let lab = ready();
    archive(&lab, "app.tar", "team/app:1", EMPTY_LAYER);
    archive(&lab, "other.tar", "team/other:1", EMPTY_LAYER);
    let prepare = r"
        coracle image load < app.tar && coracle image load < other.tar
        coracle image save -o two.tar team/app:1 team/other:1
        gzip < app.tar | head -c 200000 > cut.tar.gz; head -c 200000 app.tar > cut.tar
        tar --create --file=empty.tar --files-from=/dev/null; touch nothing; mkdir empty closed
        tar --create --file=foreign.tar --directory=/etc passwd; echo words > text
        cp app.tar secret.tar; chmod 0 secret.tar; chmod 500 closed
    ";
    shell(&lab, &format!("{{ {prepare} }}")).run().succeeded();
    let full = format!("/home/user1/{DIR}/full");
    let mount =
        format!("mkdir {full} && mount --no-mtab -t tmpfs -o size=300k,mode=1777 full {full}");
    lab.root("login", &mount).succeeded();
    let no_image = "neither one of `docker save` nor an OCI image layout";
    let unreadable = "the archive can't be read";
    let expected: &[(&str, i32, &[&str])] = &[
        (
            "load -i absent.tar",
            74,
            &["can't read absent.tar", "No such file"],
        ),
        (
            "load -i secret.tar",
            74,
            &["can't read secret.tar", "Permission denied"],
        ),
        ("load -i empty", 74, &["can't load empty", no_image]),
        ("load -i empty.tar", 74, &["can't load empty.tar", no_image]),
        (
            "load -i nothing",
            74,
            &["can't load nothing", "the archive is empty"],
        ),
        (
            "load < /dev/null",
            74,
            &["can't load standard input", "the archive is empty"],
        ),
        (
            "load -i cut.tar.gz",
            74,
            &["can't load cut.tar.gz", unreadable],
        ),
        (
            "load -i cut.tar",
            74,
            &["can't load cut.tar", unreadable, "unexpected end of file"],
        ),
        (
            "load -i foreign.tar",
            74,
            &[
                "can't load foreign.tar",
                no_image,
                "it has no manifest.json",
            ],
        ),
        (
            "load -i text",
            74,
            &["can't load text", "this is no tar archive"],
        ),
        (
            "load -i app.tar --name team/App:1",
            64,
            &["team/App:1", "must be lowercase"],
        ),
        (
            "load -i two.tar --name team/app:2",
            64,
            &["the archive has 2 images, and a name was given for one"],
        ),
        (
            "load -i app.tar --store full/store",
            73,
            &[
                "there is no room left in",
                "full/store",
                "hint: make room with `coracle image prune`",
            ],
        ),
        (
            "load -i app.tar --store text/store",
            74,
            &["can't make the directory", "text/store"],
        ),
        (
            "load -i app.tar --store closed/store",
            73,
            &[
                "can't make the directory",
                "closed/store",
                "Permission denied",
            ],
        ),
        ("pull team/App", 64, &["team/App", "must be lowercase"]),
        ("pull team/app:1 'a b'", 64, &["a b"]),
        (
            "pull login:5999/team/app:1",
            74,
            &[
                "can't connect to login:5999",
                "Connection refused",
                "hint: ",
            ],
        ),
        (
            "save team/absent",
            74,
            &[
                "there is no image docker.io/team/absent:latest in the store",
                "hint: `coracle image ls`",
            ],
        ),
        ("save team/APP", 64, &["team/APP"]),
        (
            "save team/app:1 -o absent/app.tar",
            73,
            &["can't write", "absent/app.tar", "No such file"],
        ),
        (
            "save team/app:1 -o empty",
            73,
            &[
                "empty: it is a directory",
                "hint: name a file, or say `--format oci-dir`",
            ],
        ),
        (
            "save team/app:1 -o closed/app.tar",
            73,
            &["closed/app.tar", "Permission denied"],
        ),
        (
            "save team/app:1 -o full/app.tar",
            73,
            &["can't write", "full/app.tar", "No space left"],
        ),
        (
            "save team/app:1 > /dev/full",
            73,
            &["can't write the archive", "No space left"],
        ),
        (
            "save team/app:1 --format oci-dir",
            64,
            &["standard output", "hint: name it with `-o DIR`"],
        ),
        (
            "save team/app:1 --format oci-dir -o text",
            73,
            &["can't write text"],
        ),
        (
            "rm team/absent:1",
            74,
            &["there is no image docker.io/team/absent:1"],
        ),
        ("prune --older-than soon", 64, &["--older-than"]),
        (
            "prune --keep-bytes 3X",
            64,
            &["--keep-bytes", "K, M, G or T"],
        ),
        ("pull", 64, &["IMAGE"]),
        ("push team/app:1", 64, &["push"]),
    ];
    let mut wrong = Vec::new();
    let mut check = |call: Call, name: &str, code: i32, words: &[&str]| {
        let output = call.run();
        // On a terminal both streams are one.
        let said = format!("{}{}", output.stdout, output.stderr);
        let missing = words.iter().any(|words| !said.contains(words));
        if output.code != code || missing || said.contains("panicked") {
            wrong.push(format!("{name}: not {code} with {words:?}{output}"));
        }
    };
    for (words, code, said) in expected {
        check(image(&lab, words), words, *code, said);
    }
    let limits = "CORACLE_IMAGE_LIMITS=bytes=1M coracle image load -i app.tar";
    let more = "it holds more than 1048576 bytes";
    check(
        shell(&lab, limits),
        limits,
        74,
        &["can't load app.tar", more],
    );
    let limits = "CORACLE_IMAGE_LIMITS=size=1M coracle image load -i app.tar";
    check(
        shell(&lab, limits),
        limits,
        64,
        &["CORACLE_IMAGE_LIMITS has no \"size\""],
    );
    for (words, said) in [
        (
            "load",
            [
                "not read from a terminal",
                "hint: name a file or directory with `-i FILE`",
            ],
        ),
        (
            "save team/app:1",
            [
                "not written to a terminal",
                "hint: name a file with `-o FILE`",
            ],
        ),
    ] {
        let script = format!("script -qec 'coracle image {words}' /dev/null");
        check(shell(&lab, &script), words, 64, &said);
    }
    let broken = format!("/home/user1/{DIR}/broken");
    lab.write(
        &format!("{DIR}/broken/coracle/registries.toml"),
        "[registry.login]\nmirror = 1\n",
    );
    let script = format!("XDG_CONFIG_HOME={broken} coracle image pull team/app:1");
    let said = [
        "coracle/registries.toml is not a configuration of registries",
        "unknown field `mirror`",
        "line 2",
    ];
    check(shell(&lab, &script), "registries.toml", 74, &said);
    // What was asked for with it is done.
    check(
        image(&lab, "rm team/absent:1 team/app:1"),
        "rm of two",
        74,
        &[
            "removed docker.io/team/app:1",
            "there is no image docker.io/team/absent:1",
        ],
    );
    let left = shell(
        &lab,
        "ls; find store/partial -type f; ls full/*.tar 2> /dev/null",
    )
    .run()
    .stdout;
    lab.root("login", &format!("umount --no-mtab {full}"))
        .succeeded();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        !left.contains(".new-") && !left.contains("full/app.tar"),
        "{left}"
    );
    assert_eq!(listed(&lab, "store"), ["docker.io/team/other:1"]);
    lab.remove(DIR);
    lab.nothing_left();
}

/// A helper that knows the registry's password, and notes who asked.
const HELPER: &str = r#"#!/bin/sh
read -r server || true
echo "$1 $server" >> "$HOME/images-test/asked"
case $server in
  login:5000) echo '{"ServerURL":"login:5000","Username":"user","Secret":"right"}' ;;
  *) echo 'credentials not found in native keychain'; exit 1 ;;
esac
"#;

#[track_caller]
fn write_helper(lab: &Lab) {
    lab.write(&format!("{DIR}/bin/docker-credential-lab"), HELPER);
    lab.sh(&format!("chmod 755 ~/{DIR}/bin/*"))
        .run()
        .succeeded();
}

#[test]
fn registries_are_treated_as_configured() {
    let lab = ready();
    let registry = lab.registry();
    let app = registry.push_as("team/app", "1", Form::Docker, says("app"), EMPTY_LAYER);
    registry.push(
        "team/bad",
        says("bad"),
        "echo content > file && tar --create file",
    );
    let mirror = lab.mirror();
    let tool = mirror.push_as(
        "hub/library/tool",
        "1",
        Form::Zstd,
        says("tool"),
        EMPTY_LAYER,
    );

    // No TLS, and nobody said so.
    lab.registries("");
    let pull = format!("pull {app}");
    image(&lab, &pull).run().ended_with(74).says(&[
        "login:5000",
        "hint: if this registry has no TLS, say `insecure = true`",
    ]);
    lab.registries(&format!("[registry.\"{REGISTRY}\"]\ninsecure = true\n"));
    image(&lab, &pull).run().ended_with(74).says(&[
        "login:5000/team/app:1: pull access denied",
        "hint: ",
        "~/.docker/config.json",
    ]);

    // With Docker's own configuration.
    let auth = |password: &str| json!({"auths": {REGISTRY: {"auth": password}}}).to_string();
    lab.write(".docker/config.json", &auth("dXNlcjpndWVzcw=="));
    image(&lab, &pull)
        .run()
        .ended_with(74)
        .says(&["pull access denied"]);
    lab.write(".docker/config.json", "{\"auths\": [");
    image(&lab, &pull)
        .run()
        .ended_with(74)
        .says(&[".docker/config.json"]);
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));
    let pulled = image(&lab, &pull).run().succeeded();
    let id = pulled.stdout.trim().to_owned();
    assert!(id.starts_with("login:5000/team/app@sha256:"), "{pulled}");
    let pulled = pulled.says(&[
        ": downloading ",
        "checksum good",
        "pulled login:5000/team/app:1 (",
    ]);
    assert!(!pulled.stderr.contains('\u{1b}'), "{pulled}");
    // What is here isn't downloaded again.
    let before = registry.answered("GET /v2/team/app/blobs/");
    assert_eq!(before, 3);
    image(&lab, &pull).run().succeeded().printed(&id);
    image(&lab, &format!("pull {id}"))
        .run()
        .succeeded()
        .printed(&id);
    assert_eq!(registry.answered("GET /v2/team/app/blobs/"), before);
    // A terminal has bars.
    let bars = format!("script -qec 'stty cols 120; coracle image {pull} --store bars' /dev/null");
    let bars = shell(&lab, &bars).run().succeeded();
    assert!(
        bars.stdout.contains('█') && bars.stdout.contains('\u{1b}'),
        "{bars}"
    );

    // With a helper.
    lab.remove(".docker");
    write_helper(&lab);
    for (number, config) in [
        json!({"credHelpers": {REGISTRY: "lab"}}),
        json!({"credsStore": "lab", "auths": {REGISTRY: {}}}),
    ]
    .iter()
    .enumerate()
    {
        lab.write(&format!("{DIR}/docker/config.json"), &config.to_string());
        let pull = format!(
            "PATH=$PWD/bin:$PATH DOCKER_CONFIG=$PWD/docker coracle image {pull} --store helped-{number}"
        );
        shell(&lab, &pull).run().succeeded().printed(&id);
    }
    shell(&lab, "cat asked")
        .run()
        .printed("get login:5000\nget login:5000");
    for (name, said) in [("absent", "No such file"), ("false", "exit")] {
        shell(&lab, "ln -sf /bin/false bin/docker-credential-false")
            .run()
            .succeeded();
        let config = json!({"credHelpers": {REGISTRY: name}}).to_string();
        lab.write(&format!("{DIR}/docker/config.json"), &config);
        let pull = format!(
            "PATH=$PWD/bin:$PATH DOCKER_CONFIG=$PWD/docker coracle image {pull} --store helped-not"
        );
        let program = format!("docker-credential-{name}");
        shell(&lab, &pull)
            .run()
            .ended_with(74)
            .says(&[&program, said]);
    }

    // Something else than what was asked for.
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));
    registry.spoil("team/bad", "1");
    image(&lab, &format!("pull {REGISTRY}/team/bad:1"))
        .run()
        .ended_with(74)
        .says(&["login:5000 sent sha256:", " instead of sha256:"]);
    let other = format!("{REGISTRY}/team/app@sha256:{}", "0".repeat(64));
    image(&lab, &format!("pull {other}"))
        .run()
        .ended_with(74)
        .says(&[": not found"]);
    assert_eq!(listed(&lab, "store"), [app.as_str(), &id]);

    // A certificate that nobody knows; then its authority is known, or nobody cares.
    let pull = format!("pull {tool}");
    image(&lab, &pull)
        .run()
        .ended_with(74)
        .says(&["certificate", "hint: ", "`ca = \"FILE\"`"]);
    for (number, rule) in ["ca = \"/home/user1/mirror/ca.pem\"", "insecure = true"]
        .iter()
        .enumerate()
    {
        lab.registries(&format!("[registry.\"{MIRROR}\"]\n{rule}\n"));
        image(&lab, &format!("{pull} --store trusted-{number}"))
            .run()
            .succeeded();
    }
    // Mirrors, the first of which can't help, for a registry that can't be reached.
    lab.registries(&format!(
        "[registry.\"docker.io\"]\nmirrors = [\"login:5999\", \"https://{MIRROR}/hub\"]\n\
         [registry.\"{MIRROR}\"]\nca = \"/home/user1/mirror/ca.pem\"\n"
    ));
    image(&lab, "pull tool:1")
        .run()
        .succeeded()
        .says(&[
            "a mirror can't be used",
            "login:5999",
            "pulled docker.io/library/tool:1",
        ])
        .shows(&["docker.io/library/tool@sha256:"]);
    tokens_open_doors_and_downloads_go_on(&lab, &registry);
    drop((registry, mirror));
    lab.remove(".docker");
    lab.remove(DIR);
    lab.nothing_left();
}

/// A registry that demands tokens, and a pull that is killed in the middle of a layer.
#[track_caller]
fn tokens_open_doors_and_downloads_go_on(lab: &Lab, registry: &Registry<'_>) {
    let noise = "head -c 12M /dev/urandom > noise && tar --create noise";
    registry.push("team/large", says("large"), noise);
    let (_, manifest) = registry.manifest("team/large", "1");
    let layer = &manifest["layers"][1];
    let size = layer["size"].as_u64().expect("a size");
    let digest = layer["digest"].as_str().expect("a digest");
    let tokens = lab.token_registry(registry);
    lab.registries(&format!("[registry.\"{TOKENS}\"]\ninsecure = true\n"));
    let large = format!("{TOKENS}/team/large:1");
    let pull = format!("pull {large} --store tokens");

    // Neither nobody nor who knows a wrong password.
    lab.remove(".docker");
    let denied = format!("{large}: pull access denied");
    image(lab, &pull).run().ended_with(74).says(&[&denied]);
    let auth = |password: &str| json!({"auths": {TOKENS: {"auth": password}}}).to_string();
    lab.write(".docker/config.json", &auth("dXNlcjpndWVzcw=="));
    image(lab, &pull).run().ended_with(74).says(&[&denied]);
    lab.write(".docker/config.json", &auth("dXNlcjpyaWdodA=="));

    tokens.halt();
    let killed = image(lab, &pull).start();
    let half = size / 2;
    let there = format!("stat --format=%s tokens/partial/* | grep -x {half}");
    wait_until(45, "half of the layer is there", || {
        shell(lab, &there).run().code == 0
    });
    let words = format!("coracle image pull {large}");
    for process in lab.processes_of("login", "user1") {
        if process.args.starts_with(&words) {
            lab.kill("login", "KILL", &process);
        }
    }
    killed.wait(Duration::from_secs(30)).ended_with(137);
    tokens.go_on();

    // The next one goes on where it was, with a token of its own for all that it asks.
    let before = tokens.answered().lines().count();
    image(lab, &pull).run().succeeded();
    assert_eq!(listed(lab, "tokens"), [large]);
    let asked = tokens.answered();
    let token = "GET /token?service=lab&scope=repository%3Ateam%2Flarge%3Apull - 200";
    let given = asked.lines().skip(before).filter(|line| *line == token);
    assert_eq!(given.count(), 1, "{asked}");
    let blob = format!("GET /v2/team/large/blobs/{digest}");
    let downloads: Vec<_> = asked
        .lines()
        .filter_map(|line| line.strip_prefix(&blob))
        .collect();
    let rest = format!(" bytes={half}- 206");
    assert_eq!(downloads, [" - 200", &rest], "{asked}");
}

/// A pod of one container that does what its image says.
fn plain(name: &str, image: &str, more: Value) -> Value {
    let main = json!({"name": "main", "image": image});
    pod(name, json!({}), &[merged(main, more)])
}

/// Waits until a pod waits, with these words in its message.
#[track_caller]
fn waits_with(cluster: &mut Cluster, pod: &str, words: &str) {
    let mut last = Value::Null;
    let seen = eventually(Duration::from_secs(45), || {
        last = cluster.pod(pod)["status"]["containerStatuses"][0]["state"]["waiting"].clone();
        let reason = last["reason"].as_str().unwrap_or_default();
        let message = last["message"].as_str().unwrap_or_default();
        let pulling = ["ErrImagePull", "ImagePullBackOff"].contains(&reason);
        (pulling && message.contains(words)).then_some(())
    });
    assert!(seen.is_some(), "{pod}: never {words:?}: {last}");
}

#[test]
fn pods_get_images_of_all_kinds_and_each_only_once() {
    let lab = ready();
    let registry = lab.registry();
    let mirror = lab.mirror();
    write_helper(&lab);
    lab.write(
        ".docker/config.json",
        &json!({"credHelpers": {REGISTRY: "lab"}}).to_string(),
    );
    lab.registries(&format!(
        "[registry.\"{REGISTRY}\"]\ninsecure = true\n\
         [registry.\"docker.io\"]\nmirrors = [\"https://{MIRROR}/hub\"]\n\
         [registry.\"{MIRROR}\"]\nca = \"/home/user1/mirror/ca.pem\"\n"
    ));
    // An entry for machines of another kind comes first.
    registry.push_as(
        "team/multi",
        "foreign",
        Form::Plain,
        says("foreign"),
        EMPTY_LAYER,
    );
    registry.push_as("team/multi", "own", Form::Zstd, says("own"), EMPTY_LAYER);
    let multi = registry.push_index("team/multi", "1", &[("arm64", "foreign"), ("amd64", "own")]);
    let foreign = registry.push_index(
        "team/multi",
        "2",
        &[("arm64", "foreign"), ("s390x", "foreign")],
    );
    let zstd = registry.push_as("team/zstd", "1", Form::Zstd, says("zstd"), EMPTY_LAYER);
    let docker = registry.push_as(
        "team/docker",
        "1",
        Form::Docker,
        says("docker"),
        EMPTY_LAYER,
    );
    let bad = registry.push(
        "team/bad",
        says("bad"),
        "echo content > file && tar --create file",
    );
    registry.spoil("team/bad", "1");
    mirror.push("hub/library/tool", says("tool"), EMPTY_LAYER);
    let moving = registry.push("team/moving", says("old"), EMPTY_LAYER);
    let noise = "head -c 12M /dev/urandom > noise && tar --create noise";
    let many = registry.push("team/many", says("many"), noise);
    // Out of the store and into it again.
    lab.load_image("coracle.test/first:1", says("again"), EMPTY_LAYER);
    lab.sh("set -o pipefail; coracle image save coracle.test/first:1 | coracle image load --name coracle.test/again:1")
        .run()
        .succeeded();

    let path = format!("/home/user1/{DIR}/bin:/opt/coracle/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    let start = format!("PATH={path}");
    let gc = "CORACLE_IMAGE_GC=high=0,low=0,age=60m,every=1s";
    let words = ["env", &start, gc, "srun", "-N2", "coracle", "run"];
    let mut cluster = Cluster::start_as(&lab, "user1", &words);
    let (index, list) = registry.manifest("team/multi", "1");
    let pinned = format!(
        "{REGISTRY}/team/multi@{}",
        list["manifests"][1]["digest"].as_str().expect("a digest")
    );
    let named: Vec<String> = (0..8).map(|number| format!("many-{number}")).collect();
    let mut pods: Vec<Value> = named
        .iter()
        .map(|name| plain(name, &many, json!({})))
        .collect();
    let never = json!({"imagePullPolicy": "Never"});
    pods.extend([
        plain("multi", &multi, json!({})),
        plain("foreign", &foreign, json!({})),
        plain("zstd", &zstd, json!({})),
        plain("docker", &docker, json!({})),
        plain("bad", &bad, json!({})),
        plain("pinned", &pinned, json!({})),
        plain("tool", "tool:1", json!({})),
        plain("again", "coracle.test/again:1", never),
        plain("moving", &moving, json!({})),
    ]);
    cluster.create_objects(&pods);
    for (name, said) in [
        ("multi", "own"),
        ("zstd", "zstd"),
        ("docker", "docker"),
        ("pinned", "own"),
        ("tool", "tool"),
        ("again", "again"),
        ("moving", "old"),
    ] {
        cluster.in_phase(name, "Succeeded");
        assert_eq!(cluster.logs(name, "main"), said);
    }
    let status = cluster.pod("multi");
    let id = format!("{REGISTRY}/team/multi@{index}");
    assert_eq!(container(&status, "main")["imageID"], id);
    waits_with(
        &mut cluster,
        "foreign",
        "no match for platform linux/amd64 in manifest: it has linux/arm64, linux/s390x",
    );
    waits_with(&mut cluster, "bad", " instead of sha256:");

    // One download for all, on both nodes: a configuration and two layers.
    let mut nodes = Vec::new();
    for name in &named {
        let pod = cluster.in_phase(name, "Succeeded");
        nodes.push(pod["spec"]["nodeName"].to_string());
    }
    nodes.sort();
    nodes.dedup();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    assert_eq!(registry.answered("GET /v2/team/many/blobs/"), 3);

    // A tag that means something else now is noticed by those who ask always; what didn't change isn't downloaded.
    registry.push("team/moving", says("new"), EMPTY_LAYER);
    cluster.create_objects(&[plain(
        "present",
        &moving,
        json!({"imagePullPolicy": "IfNotPresent"}),
    )]);
    cluster.in_phase("present", "Succeeded");
    assert_eq!(cluster.logs("present", "main"), "old");
    let always = json!({"imagePullPolicy": "Always"});
    for (name, downloads) in [("always", 1), ("still", 0)] {
        let before = registry.answered("GET /v2/team/moving/blobs/");
        cluster.create_objects(&[plain(name, &moving, always.clone())]);
        cluster.in_phase(name, "Succeeded");
        assert_eq!(cluster.logs(name, "main"), "new");
        assert_eq!(
            registry.answered("GET /v2/team/moving/blobs/") - before,
            downloads,
            "{name}"
        );
        cluster.event(name, "Normal Pulled Successfully pulled image");
    }

    // What was used in the last hour stays, however full the disk is.
    let layers = |lab: &Lab| {
        lab.root("node1", "ls /tmp/coracle-*/layers")
            .succeeded()
            .stdout
    };
    let before = layers(&lab);
    cluster.ask("kubectl delete pod --all --now");
    let log = "kubectl get --raw '/api/v1/nodes/node1/proxy/logs/?query=kubelet'";
    let looks = |cluster: &mut Cluster| cluster.ask(log).matches("0 layers removed").count();
    let so_far = looks(&mut cluster);
    wait_until(30, "it was looked for what could go", || {
        looks(&mut cluster) >= so_far + 2
    });
    assert_eq!(layers(&lab), before);

    // A registry that is gone matters only to those who ask always.
    drop((registry, mirror));
    cluster.create_objects(&[
        plain("present", &moving, json!({})),
        plain("always", &moving, always),
    ]);
    cluster.in_phase("present", "Succeeded");
    assert_eq!(cluster.logs("present", "main"), "new");
    let gone = cluster.pod_until("always", "waits for the registry", |pod| {
        let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
        waiting["message"]
            .as_str()
            .is_some_and(|said| said.contains("team/moving:1"))
    });
    assert_eq!(gone["status"]["phase"], "Pending");
    cluster.exit(0);
    let names = [
        multi.as_str(),
        &pinned,
        &zstd,
        &docker,
        &moving,
        &many,
        "tool:1",
        "coracle.test/first:1",
        "coracle.test/again:1",
    ];
    lab.sh(&format!("coracle image rm {}", names.join(" ")))
        .run()
        .succeeded();
    lab.remove(".docker");
    lab.remove(DIR);
    lab.nothing_left();
}

/// Layers that do what no layer may, and what is said of them.
const REFUSED: &[(&str, &str, &str)] = &[
    (
        "above",
        "touch x && tar --absolute-names --transform='s,^x,srv/../../../tmp/escaped,' --create x",
        "leads out of the layer",
    ),
    (
        "linked",
        "touch a && ln a b && tar --absolute-names --transform='flags=h;s,^a,/etc/shadow,' --create a b",
        "it is a hard link to /etc/shadow, which isn't a file of this layer",
    ),
    (
        "circle",
        "ln -s b a && ln -s a b && mkdir d && touch d/x && tar --transform='s,^d,a,' --create a b d/x",
        "a/x",
    ),
    (
        "hidden",
        "touch .wh... && tar --create .wh...",
        "it hides a name that no file has",
    ),
    (
        "header",
        r#"perl -e '$s = 3 << 20; $h = pack("a100a8a8a8a12a12a8a1a100a8a247", "././\@LongLink", "0000644", "0000000", "0000000", sprintf("%011o", $s), "00000000000", " " x 8, "L", "", "ustar  ", ""); substr($h, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $h)); print $h, "x" x $s;'"#,
        "an extension header is 3145728 bytes large",
    ),
    (
        "bomb",
        "truncate --size=24M zeros && tar --create zeros",
        "the image is larger than is allowed: its layers hold more bytes than may be unpacked",
    ),
    (
        "crowd",
        "seq 1500 | xargs touch && tar --create .",
        "the image is larger than is allowed: it has more files than may be unpacked",
    ),
];

/// A layer that tries much, and may: all of it stays inside, or is left out.
const ODD: &str = r#"
add() { tar --file=layer --append --absolute-names "$@"; }
tar --file=layer --create --files-from=/dev/null
# Absolute names are those of the container.
echo absolute > x; add --transform='s,^x,/srv/absolute,' x
# Symlinks are followed as if the layer were the root.
ln -s ../../../../../../tmp out; ln -s /escaped absolute-out; mkdir dir; echo through > dir/escaped-here
add out absolute-out
add --transform='s,^dir,out,' dir/escaped-here
add --transform='s,^dir,absolute-out,' dir/escaped-here
# A hard link to a symlink is that symlink.
ln -s /etc/shadow link; ln link again; add link again
# The last of a name counts.
echo first > twice; add twice; echo last > twice; add twice
mkdir thing; echo below > thing/below; add thing; rm -r thing; echo file > thing; add thing
# Devices are left out.
add --transform='s,^/dev/,srv/,' /dev/null /dev/full
# A deletion reaches through a link only inside.
ln -s ../../../../etc far; add far; mkdir p; touch p/.wh.group; add --transform='s,^p,far,' p/.wh.group
# Marks of overlay file systems would hide what is below. tar writes none, so this comes first.
perl -e '
sub header {
  my ($name, $kind, $size) = @_;
  my $h = pack("a100a8a8a8a12a12a8a1a100a8a247", $name, "0000755", "0000000", "0000000", sprintf("%011o", $size), "00000000000", " " x 8, $kind, "", "ustar\x0000", "");
  substr($h, 148, 8) = sprintf("%06o\0 ", unpack("%32C*", $h));
  $h
}
my $records = join "", map { my $r = " SCHILY.xattr.$_.opaque=y\n"; (length($r) + 2) . $r } qw(user.overlay trusted.overlay user.fuseoverlayfs);
print header("pax", "x", length $records), pack("a512", $records), header("etc/", "5", 0);
'
cat layer
"#;

#[test]
fn hostile_layers_do_no_harm() {
    let lab = ready();
    for (name, layer, _) in REFUSED {
        lab.load_image(&format!("coracle.test/{name}:1"), says("never"), layer);
    }
    let odd = "coracle.test/odd:1";
    lab.load_image(odd, says("odd"), ODD);
    let limits = "CORACLE_IMAGE_LIMITS=bytes=16M,files=1000";
    let words = ["env", limits, "srun", "-N1", "coracle", "run"];
    let mut cluster = Cluster::start_as(&lab, "user1", &words);
    let look = looking(
        "main",
        json!({"image": odd}),
        r#"
        is absolute absolute "$(cat /srv/absolute)"
        is 'through a link' through "$(cat /tmp/escaped-here)"
        is 'through another' through "$(cat /escaped/escaped-here)"
        is 'a hard link to a link' /etc/shadow "$(busybox readlink /again)"
        fails cat /again
        is twice last "$(cat /twice)"
        is 'no directory any more' file "$(cat /thing)"
        is 'what is left of devices' 'absolute' "$(ls /srv)"
        works grep root /etc/passwd
        fails cat /etc/group
        "#,
    );
    let mut pods: Vec<Value> = REFUSED
        .iter()
        .map(|(name, ..)| plain(name, &format!("coracle.test/{name}:1"), json!({})))
        .collect();
    pods.push(pod("odd", json!({}), &[look]));
    cluster.create_objects(&pods);
    for (name, _, words) in REFUSED {
        waits_with(&mut cluster, name, words);
    }
    cluster.find_all_right(&["odd"]);
    let outside =
        "ls -d /tmp/escaped* /escaped* /srv/absolute /tmp/coracle-*/escaped* 2> /dev/null; true";
    assert_eq!(lab.root("node1", outside).stdout, "");
    // Unless it is just tried again, nothing is left of what was refused.
    wait_until(30, "no half of a layer stays", || {
        let half = "ls -d /tmp/coracle-*/layers/.new-* 2> /dev/null; true";
        lab.root("node1", half).stdout.is_empty()
    });
    cluster.exit(0);
    let names: Vec<_> = REFUSED
        .iter()
        .map(|(name, ..)| format!("coracle.test/{name}:1"))
        .collect();
    lab.sh(&format!("coracle image rm {odd} {}", names.join(" ")))
        .run()
        .succeeded();
    lab.nothing_left();
}
