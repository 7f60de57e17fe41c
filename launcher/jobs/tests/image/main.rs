//! Images of programs, on a real registry: Debian's `docker-registry`. If it is missing, tests print a line and pass,
//! or fail with `ENGINE_TESTS_REQUIRE=1`.

#![cfg(feature = "image")]
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "../../../../tests/src/ports.rs"]
mod ports;
mod registry;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use registry::Registry;
use serde_json::Value;
use tempfile::TempDir;

/// The options of an image of a script.
const SCRIPT: &str = "script --launcher script --base scratch";

/// A folder with the files that tests build from.
struct Site {
    folder: TempDir,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("script"), "#!/bin/sh\nexit 0\n").unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `accel-jobs image build`. The launcher is this crate's own program, an ELF file like any other.
    fn build(&self, line: &str) -> Output {
        let launcher = env!("CARGO_BIN_EXE_accel-jobs");
        let mut command = Command::new(launcher);
        command.args(["image", "build"]);
        if !line.contains("--launcher") {
            command.args(["--launcher", launcher]);
        }
        command
            .args(line.split(' '))
            .current_dir(self.folder.path());
        command.env("DOCKER_CONFIG", self.path("docker"));
        command.output().unwrap()
    }

    /// Builds, and returns the report.
    fn report(&self, line: &str) -> Value {
        let output = self.build(&format!("{line} --json"));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {stderr}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Builds, which must fail, and returns the exit code and standard error.
    fn failure(&self, line: &str) -> (i32, String) {
        let output = self.build(line);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{line}");
        assert!(stderr.contains("error: "), "{stderr}");
        (output.status.code().unwrap(), stderr)
    }

    /// Builds, which must fail with this code and this text.
    #[track_caller]
    fn refused(&self, line: &str, code: i32, text: &str) {
        let (found, said) = self.failure(line);
        assert!(
            found == code && said.contains(text),
            "{line}: {found} {said}"
        );
    }

    /// Pushes a base with a layer of its own.
    fn push_base(&self, reference: &str) {
        self.report(&format!("{SCRIPT} --push {reference}"));
    }
}

fn text<'a>(report: &'a Value, key: &str) -> &'a str {
    report[key].as_str().unwrap()
}

/// Writes a program of 20 MB, half of which cannot be compressed.
fn program_of_20_mb(path: &Path) {
    let mut contents = fs::read(env!("CARGO_BIN_EXE_accel-jobs")).unwrap();
    let mut state = 1_u64;
    contents.resize_with(contents.len().max(20 << 20), || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    });
    fs::write(path, contents).unwrap();
}

#[test]
fn an_image_is_pushed_once_and_pulled_by_its_digest() {
    let Some(registry) = Registry::start("") else {
        return;
    };
    let site = Site::new();
    let (base, image) = (
        registry.reference("base:1"),
        registry.reference("team/mnist:1"),
    );
    site.push_base(&base);
    program_of_20_mb(&site.path("mnist"));
    let arguments = format!("mnist --include script:data/script --base {base} --push {image}");
    let began = Instant::now();
    let first = site.report(&arguments);
    println!(
        "a program of 20 MB: {:.1} s until it is pushed, a layer of {} bytes",
        began.elapsed().as_secs_f64(),
        first["layer_bytes"]
    );
    let by_digest = text(&first, "reference_by_digest");
    let digest = text(&first, "digest");
    assert_eq!(
        by_digest,
        format!("{}@{digest}", registry.reference("team/mnist"))
    );
    assert_eq!(first["sent_bytes"], first["layer_bytes"]);

    let manifest = registry.manifest("team/mnist", digest);
    let layers = manifest["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 2, "{manifest}");
    let blob = |blob: &Value| registry.blob("team/mnist", text(blob, "digest"));
    let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
    assert_eq!(config["config"]["Cmd"][0], "/app/mnist");
    assert_eq!(config["rootfs"]["diff_ids"].as_array().unwrap().len(), 2);
    let layer = blob(&layers[1]);
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(layer.as_slice()));
    let entries = archive.entries().unwrap();
    let paths = entries.map(|entry| entry.unwrap().path().unwrap().display().to_string());
    let expected = ["app/data/script", "app/mnist", "usr/local/bin/accel-launch"];
    assert_eq!(paths.collect::<Vec<_>>(), expected);
    // The base's layer came from its own repository.
    assert!(
        registry.log().contains("mount=sha256"),
        "{}",
        registry.log()
    );

    // A repetition has nothing to send.
    let second = site.report(&arguments);
    assert_eq!(
        (text(&second, "digest"), &second["sent_bytes"]),
        (digest, &Value::from(0))
    );
}

#[test]
fn the_same_files_in_another_folder_are_the_same_image() {
    let folders = [(); 2].map(|()| Site::new());
    let digests = folders.each_ref().map(|site| {
        fs::create_dir(site.path("data")).unwrap();
        for name in ["data/b", "data/a", "program"] {
            fs::write(site.path(name), name).unwrap();
            std::thread::sleep(Duration::from_millis(600));
        }
        let report = site
            .report("program --launcher script --include data --base scratch --archive image.tar");
        (
            text(&report, "digest").to_owned(),
            fs::read(site.path("image.tar")).unwrap(),
        )
    });
    assert!(
        digests[0] == digests[1],
        "{} {}",
        digests[0].0,
        digests[1].0
    );
}

#[test]
fn layers_of_the_base_are_copied_to_another_registry() {
    let (Some(first), Some(second)) = (Registry::start(""), Registry::start("")) else {
        return;
    };
    let site = Site::new();
    let base = first.reference("base:1");
    site.push_base(&base);
    let program = env!("CARGO_BIN_EXE_accel-jobs");
    let image = second.reference("mnist:1");
    let report = site.report(&format!("{program} --base {base} --push {image}"));
    let manifest = second.manifest("mnist", text(&report, "digest"));
    for layer in manifest["layers"].as_array().unwrap() {
        let size = second.blob("mnist", text(layer, "digest")).len();
        assert_eq!(layer["size"], size);
    }

    // An archive has the layers too, and can be a base itself.
    site.report(&format!("{program} --base {base} --archive image.tar"));
    let image = second.reference("above:1");
    let above = format!("script --base oci-archive:image.tar --push {image}");
    let report = site.report(&above);
    let manifest = second.manifest("above", text(&report, "digest"));
    assert_eq!(manifest["layers"].as_array().unwrap().len(), 3);
}

#[test]
fn of_an_index_the_image_for_the_program_is_taken() {
    let Some(registry) = Registry::start("") else {
        return;
    };
    let site = Site::new();
    site.push_base(&registry.reference("base:1"));
    let manifest = registry.manifest("base", "1");
    let bytes = registry.raw_manifest("base", "1");
    let here = if cfg!(target_arch = "x86_64") {
        "amd64"
    } else {
        "arm64"
    };
    let push = |tag: &str, architecture: &str| {
        registry.push_index("base", tag, architecture, &bytes);
    };
    push("index", here);
    let program = env!("CARGO_BIN_EXE_accel-jobs");
    let image = registry.reference("mnist:1");
    let base = registry.reference("base:index");
    let report = site.report(&format!("{program} --base {base} --push {image}"));
    let above = registry.manifest("mnist", text(&report, "digest"));
    assert_eq!(
        above["layers"][0]["digest"],
        manifest["layers"][0]["digest"]
    );

    push("other", "s390x");
    let other = registry.reference("base:other");
    let (code, said) = site.failure(&format!("{program} --base {other} --push {image}"));
    assert_eq!(code, 2);
    assert!(
        said.contains("is there for linux/s390x, and the program is for linux/"),
        "{said}"
    );
}

#[test]
fn a_base_on_which_the_program_cannot_run_is_refused() {
    let Some(registry) = Registry::start("") else {
        return;
    };
    let program = env!("CARGO_BIN_EXE_accel-jobs");
    let image = registry.reference("mnist:1");
    let site = Site::new();
    site.refused(
        &format!("{program} --base scratch --push {image}"),
        2,
        "has no C library",
    );
    let base = registry.reference("base:1");
    site.push_base(&base);

    let mut other = fs::read(program).unwrap();
    let machine = if cfg!(target_arch = "x86_64") {
        183
    } else {
        62
    };
    other[18] = machine;
    fs::write(site.path("other"), other).unwrap();
    assert!(
        site.failure(&format!("other --base {base} --push {image}"))
            .1
            .contains("compile one of them for the other's processor")
    );
    let other = format!("other --launcher other --base {base} --push {image}");
    assert!(site.failure(&other).1.contains("take a base for it"));
}

#[test]
fn what_is_wrong_is_said() {
    let site = Site::new();
    let refused = |image: &str, code, text| {
        site.refused(&format!("{SCRIPT} --push {image}"), code, text);
    };
    // No program listens there.
    refused(
        "127.0.0.1:1/mnist:1",
        75,
        "registry 127.0.0.1:1 does not answer",
    );
    refused("UPPER/CASE", 2, "is not a reference");
    site.refused(
        "none --base scratch --push localhost:1/x",
        2,
        "there is no file none",
    );

    let Some(registry) = Registry::start("") else {
        return;
    };
    let missing = registry.reference("none:1");
    site.refused(
        &format!("script --base {missing} --push {missing}"),
        1,
        "none:1 (404)",
    );
    let by_digest = format!("{}@sha256:{}", registry.reference("x"), "0".repeat(64));
    refused(&by_digest, 2, "give a tag");
    site.refused(
        "script --launcher script --base scratch --archive /proc/image.tar",
        1,
        "/proc/image.tar cannot be written",
    );
}

#[test]
fn a_registry_is_told_who_asks() {
    // The password is `secret`.
    let user = "ann:$2b$04$2SGcHwu3lAKUbVycddrP9OsPFY.BU5/7L.7A08kD9bP2orJ/D3CfK\n";
    let Some(registry) = Registry::start(user) else {
        return;
    };
    let site = Site::new();
    let image = registry.reference("mnist:1");
    let arguments = format!("{SCRIPT} --push {image}");
    let (_, said) = site.failure(&arguments);
    assert!(
        said.contains("(401)") && said.contains("docker login 127.0.0.1"),
        "{said}"
    );
    fs::create_dir(site.path("docker")).unwrap();
    // Arguments are the encodings of `ann:wrong` and `ann:secret`.
    let login = |auth: &str| {
        let config = serde_json::json!({ "auths": { registry.address(): { "auth": auth } } });
        fs::write(site.path("docker/config.json"), config.to_string()).unwrap();
    };
    login("YW5uOndyb25n");
    assert!(
        site.failure(&arguments)
            .1
            .contains("does not take the name and the password")
    );
    login("YW5uOnNlY3JldA==");
    site.report(&arguments);
}

#[test]
fn registries_do_what_they_want() {
    let site = Site::new();
    let refused = |status: &'static str, body: &'static str, code, text| {
        let address = registry::answer_with(status, body);
        let image = format!("{address}/mnist:1");
        site.refused(&format!("{SCRIPT} --push {image}"), code, text);
    };
    let denied = r#"{"errors":[{"code":"DENIED","message":"quota exceeded"}]}"#;
    refused(
        "403 Forbidden",
        denied,
        1,
        "to this user (403): quota exceeded",
    );
    refused(
        "500 Internal Server Error",
        "no space left on device",
        75,
        "(500): no space left on device",
    );
    let taken = r#"{"errors":[{"code":"TAG_INVALID","message":"tag is immutable"}]}"#;
    refused("409 Conflict", taken, 1, "(409): tag is immutable");
}

#[test]
fn containerd_takes_the_archive() {
    let Some(containerd) = registry::containerd() else {
        return;
    };
    let site = Site::new();
    site.report("script --launcher script --base scratch --archive image.tar --name team/mnist:1");
    let import = |arguments: &[&str]| {
        let output = containerd.ctr(arguments);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        said
    };
    let archive = site.path("image.tar").display().to_string();
    import(&["images", "import", "--no-unpack", &archive]);
    let there = import(&["images", "check"]);
    assert!(
        there.contains("docker.io/team/mnist:1") && there.contains("complete (2/2)"),
        "{there}"
    );
}

#[test]
fn an_archive_that_is_no_image_is_refused() {
    let site = Site::new();
    fs::write(site.path("image.tar"), "no archive").unwrap();
    site.refused(
        "script --base oci-archive:image.tar --archive out.tar",
        2,
        "image.tar",
    );
    assert!(!site.path("out.tar").exists());
}
