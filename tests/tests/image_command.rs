//! `coracle image …` on the command line: import and export of archives, and invalid input.

use e2e::store::{DIR, acquire_lab, image, listed, shell};
use e2e::{EMPTY_LAYER, HostCommand, Lab, echo_config};

/// Writes an archive of one image, in the format of `docker save`.
#[track_caller]
fn archive(lab: &Lab, file: &str, name: &str, layer: &str) {
    let to = format!("{{ mkdir -p ~/{DIR} && cat > ~/{DIR}/{file}; }}");
    lab.archive(name, echo_config(name), layer, &to);
}

#[test]
fn archives_are_imported_and_exported() {
    let lab = acquire_lab();
    archive(&lab, "app.tar", "team/app:1", EMPTY_LAYER);
    let loaded = image(&lab, "load -i app.tar").run().succeeded();
    let id = loaded.stdout.trim().to_owned();
    assert!(id.starts_with("docker.io/team/app@sha256:"), "{loaded}");
    assert_eq!(loaded.stderr, "loaded docker.io/team/app:1\n");
    // Compressed or not, from a file or through a pipe: the result is the same.
    for script in [
        "gzip < app.tar | coracle image load",
        "zstd --quiet app.tar && coracle image load -i app.tar.zst",
        "coracle image load < app.tar",
        "mkdir unpacked && tar --directory=unpacked --extract < app.tar && coracle image load -i unpacked",
    ] {
        shell(&lab, script).run().succeeded().stdout_is(&id);
    }
    let other = id.replace("team/app", "other/name");
    image(&lab, "load -i app.tar --name other/name:2")
        .run()
        .succeeded()
        .stdout_is(&other);
    let both = ["docker.io/other/name:2", "docker.io/team/app:1"];
    assert_eq!(listed(&lab, "store"), both);
    image(&lab, "ls")
        .run()
        .succeeded()
        .stdout_has(&["IMAGE", "DIGEST", "SIZE", "USED", both[0], both[1]]);
    image(&lab, "ls | head -n 1").run().succeeded();

    // Export and import again. Only the archive is written to standard output.
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
    // The names are in the archive's manifest.json, where Docker finds them.
    shell(&lab, "tar --extract --to-stdout --file=1.tar manifest.json")
        .run()
        .stdout_has(&["\"RepoTags\":[\"docker.io/team/app:1\",\"docker.io/other/name:2\"]"]);

    // By age: images that were used recently stay. `--missing` sends no request, since this registry does not exist.
    let old = "touch -d '40 days ago' store/references/*";
    shell(&lab, old).run().succeeded();
    image(&lab, "pull --missing team/app:1")
        .run()
        .succeeded()
        .stderr_has(&["docker.io/team/app:1 is in the store"])
        .stdout_is(&id);
    let prune = "prune --older-than 30d";
    image(&lab, &format!("{prune} --dry-run"))
        .run()
        .succeeded()
        .stderr_has(&["would have freed"])
        .stdout_is(both[0]);
    assert_eq!(listed(&lab, "store"), both);
    image(&lab, prune).run().succeeded().stdout_is(both[0]);
    assert_eq!(listed(&lab, "store"), both[1..]);
    // By size: the least recently used image is removed.
    let noise = "head -c 8M /dev/urandom > noise && tar --create noise";
    archive(&lab, "big.tar", "team/big:1", noise);
    image(&lab, "load -i big.tar").run().succeeded();
    shell(&lab, old).run().succeeded();
    image(&lab, "pull --missing team/app:1").run().succeeded();
    image(&lab, "prune --keep-bytes 6M")
        .run()
        .succeeded()
        .stderr_has(&["freed 8."])
        .stdout_is("docker.io/team/big:1");
    // By name, or by the digest reference that was printed.
    image(&lab, "load -i app.tar --name other/name:2")
        .run()
        .succeeded();
    image(&lab, "rm team/app:1")
        .run()
        .succeeded()
        .stderr_has(&["removed docker.io/team/app:1", "freed 0 B"]);
    image(&lab, &format!("rm {other}"))
        .run()
        .succeeded()
        .stderr_has(&[
            "removed docker.io/other/name@sha256:",
            ", and with it docker.io/other/name:2",
        ]);
    assert!(listed(&lab, "store").is_empty());
    shell(&lab, "find store/blobs store/partial -type f")
        .run()
        .succeeded()
        .stdout_is("");
    lab.remove(DIR);
    lab.assert_nothing_left();
}

#[test]
fn invalid_input_is_reported() {
    let lab = acquire_lab();
    archive(&lab, "app.tar", "team/app:1", EMPTY_LAYER);
    archive(&lab, "other.tar", "team/other:1", EMPTY_LAYER);
    let prepare = r"
        coracle image load < app.tar && coracle image load < other.tar
        coracle image save -o two.tar team/app:1 team/other:1
        gzip < app.tar | head -c 200000 > cut.tar.gz; head -c 200000 app.tar > cut.tar
        tar --create --file=empty.tar --files-from=/dev/null; touch nothing; mkdir empty closed
        tar --create --file=foreign.tar --directory=/etc passwd; echo text > text
        cp app.tar secret.tar; chmod 0 secret.tar; chmod 500 closed
    ";
    shell(&lab, &format!("{{ {prepare} }}")).run().succeeded();
    let full = format!("/home/user1/{DIR}/full");
    let mount =
        format!("mkdir {full} && mount --no-mtab -t tmpfs -o size=300k,mode=1777 full {full}");
    lab.root("login", &mount).succeeded();
    let no_image = "neither from `docker save` nor an OCI image layout";
    let unreadable = "cannot read the archive";
    let cases: &[(&str, i32, &[&str])] = &[
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
            &["can't load text", "not a tar archive"],
        ),
        (
            "load -i app.tar --name team/App:1",
            64,
            &["team/App:1", "must be lowercase"],
        ),
        (
            "load -i two.tar --name team/app:2",
            64,
            &["the archive has 2 images, but one name was given"],
        ),
        (
            "load -i app.tar --store full/store",
            73,
            &[
                "no space left in",
                "full/store",
                "hint: make room with `coracle image prune`",
            ],
        ),
        (
            "load -i app.tar --store text/store",
            74,
            &["cannot create directory", "text/store"],
        ),
        (
            "load -i app.tar --store closed/store",
            73,
            &[
                "cannot create directory",
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
                "cannot connect to login:5999",
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
                "hint: name a file, or use `--format oci-dir`",
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
            &["cannot write the archive", "No space left"],
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
    let mut failures = Vec::new();
    let mut check = |command: HostCommand, name: &str, code: i32, expected: &[&str]| {
        let output = command.run();
        // On a terminal both streams are one.
        let printed = format!("{}{}", output.stdout, output.stderr);
        let missing = expected.iter().any(|text| !printed.contains(text));
        if output.code != code || missing || printed.contains("panicked") {
            failures.push(format!("{name}: not {code} with {expected:?}{output}"));
        }
    };
    for (args, code, errors) in cases {
        check(image(&lab, args), args, *code, errors);
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
    for (args, errors) in [
        (
            "load",
            [
                "read an archive from a terminal",
                "hint: name a file or directory with `-i FILE`",
            ],
        ),
        (
            "save team/app:1",
            [
                "write an archive to a terminal",
                "hint: name a file with `-o FILE`",
            ],
        ),
    ] {
        let script = format!("script -qec 'coracle image {args}' /dev/null");
        check(shell(&lab, &script), args, 64, &errors);
    }
    let broken = format!("/home/user1/{DIR}/broken");
    lab.write(
        &format!("{DIR}/broken/coracle/registries.toml"),
        "[registry.login]\nmirror = 1\n",
    );
    let script = format!("XDG_CONFIG_HOME={broken} coracle image pull team/app:1");
    let errors = [
        "cannot parse",
        "coracle/registries.toml",
        "unknown field `mirror`",
        "line 2",
    ];
    check(shell(&lab, &script), "registries.toml", 74, &errors);
    // The images that exist are removed nevertheless.
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
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(
        !left.contains(".new-") && !left.contains("full/app.tar"),
        "{left}"
    );
    assert_eq!(listed(&lab, "store"), ["docker.io/team/other:1"]);
    lab.remove(DIR);
    lab.assert_nothing_left();
}
