//! `accel-launch env`.

mod support;

use support::{Folder, Run};

#[test]
fn json_tells_what_is_there() {
    let folder = Folder::new();
    let text = folder.launch(["env", "--json"]).expect(0).text();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(report["cores"], cores);
    assert_eq!(report["threads"][0]["threads_per_rank"], cores);
    assert_eq!(report["platform"]["os"], std::env::consts::OS);
    assert_eq!(report["tools"][0]["name"], "cargo");
    assert!(
        report["tools"][0]["version"]
            .as_str()
            .unwrap()
            .starts_with("cargo ")
    );
    assert_eq!(report["errors"], serde_json::json!([]));
    assert!(
        report["settings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|setting| setting["name"] == "world size")
    );
}

#[test]
fn settings_have_origins() {
    let folder = Folder::new();
    let mut command = folder.launcher();
    command.arg("env").envs([
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("OMP_NUM_THREADS", "3"),
    ]);
    let text = Run::start(command).end().expect(0).text();
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    for expected in [
        "rank 1 RANK",
        "world size 2 WORLD_SIZE",
        "store port 29500 MASTER_PORT",
        "OMP_NUM_THREADS 3 environment",
    ] {
        assert!(
            lines.iter().any(|line| line == expected),
            "{expected:?} is not in {text}"
        );
    }
}

#[test]
fn errors_in_the_environment_are_shown() {
    let folder = Folder::new();
    for arguments in [&["env"][..], &["env", "--json"]] {
        let mut command = folder.launcher();
        command
            .args(arguments)
            .env("RANK", "banana")
            .env("WORLD_SIZE", "2");
        let ended = Run::start(command).end().expect(1);
        let text = ended.text();
        assert!(text.contains("RANK") && text.contains("banana"), "{text}");
        if arguments.len() == 2 {
            let report: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert_eq!(report["errors"].as_array().unwrap().len(), 1);
            assert!(report["topology"].is_null());
        }
    }
}
