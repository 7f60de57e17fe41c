//! The GPUs that ranks get, and the GPUs of a machine. The tests need none.

use crate::support::Folder;

#[test]
fn every_rank_sees_the_list() {
    let folder = Folder::new();
    folder.script(
        "rank.sh",
        "echo \"$LOCAL_RANK of $CUDA_VISIBLE_DEVICES, $CUDA_DEVICE_ORDER, $ACCEL_OVERSUBSCRIBE_GPUS\"",
    );
    for (line, visible, expected) in [
        ("-n 2 --gpu-ids 0,2", None, "0,2, PCI_BUS_ID, "),
        ("-n 2 --gpu_ids 0,2", Some("4,5,GPU-5a"), "4,GPU-5a, , "),
        (
            "-n 3 --gpu-ids 1,0 --oversubscribe-gpus",
            None,
            "1,0, PCI_BUS_ID, 1",
        ),
        ("-n 2 --gpu-ids all", Some("7"), "7, , "),
        ("-n 2", Some("7"), "7, , "),
    ] {
        let line = format!("{line} --no-prefix rank.sh");
        let variables = visible.map(|value| ("CUDA_VISIBLE_DEVICES", value));
        let ended = folder.launch_with(&line, variables).expect(0);
        let said = ended.sorted();
        let all: Vec<_> = (0..said.len())
            .map(|rank| format!("{rank} of {expected}"))
            .collect();
        assert_eq!(said, all, "{line}");
        assert!(said.len() >= 2, "{line}");
    }
}

#[test]
fn impossible_options_are_refused_before_a_rank_runs() {
    let folder = Folder::new();
    folder.script("rank.sh", "echo ran >> ran");
    for (line, visible, parts) in [
        ("-n 3 --gpu-ids 0,2", None, &["3 ranks", "2 GPUs"][..]),
        ("-n 1:3 --gpu-ids 0,2", None, &["3 ranks", "2 GPUs"]),
        ("-n 1 --gpu-ids 2", Some("4,5"), &["names 2", "shows 2"]),
        ("-n 1 --gpu-ids 0", Some(""), &["hides every GPU"]),
        ("-n 1 --gpu-ids 0,0", None, &["0 is named twice"]),
        ("-n 1 --gpu-ids first", None, &["\"first\" is no GPU"]),
        ("-n 1 --gpu-ids=", None, &["--gpu-ids"]),
    ] {
        let variables = visible.map(|value| ("CUDA_VISIBLE_DEVICES", value));
        for extra in ["", " --dry-run"] {
            let line = format!("{line}{extra} rank.sh");
            let mut ended = folder.launch_with(&line, variables).expect(2);
            for part in parts {
                ended = ended.says(part);
            }
        }
    }
    assert!(!folder.path().join("ran").exists());
}

#[test]
fn a_dry_run_shows_who_takes_which() {
    let folder = Folder::new();
    folder.script("rank.sh", "true");
    let line = "--dry-run -n 3 --gpu-ids 0,2 --oversubscribe-gpus rank.sh";
    folder
        .launch(line)
        .expect(0)
        .shows("rank local rank world size local world size GPU")
        .shows("1 1 3 3 2")
        .shows("2 2 3 3 0")
        .shows("GPUs 0,2 --gpu-ids")
        .shows("GPU sharing allowed --oversubscribe-gpus");
    let variables = [("ACCEL_OVERSUBSCRIBE_GPUS", "1")];
    let ended = folder.launch_with("--dry-run -n 2 rank.sh", variables);
    ended
        .expect(0)
        .shows("1 1 2 2")
        .shows("GPUs all default")
        .shows("GPU sharing allowed ACCEL_OVERSUBSCRIBE_GPUS");
}

#[test]
fn env_lists_the_gpus_and_which_are_visible() {
    let folder = Folder::new();
    folder.script(
        "nvidia-smi",
        "echo '0, NVIDIA T, 16384, 550.54.15, GPU-test-0, 00000000:F8:00.0'\n\
         echo '1, NVIDIA T, 16384, 550.54.15, GPU-test-1, 00000000:F9:00.0'",
    );
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{path}", folder.path().display());
    let variables = [("PATH", path.as_str()), ("CUDA_VISIBLE_DEVICES", "1")];
    let report = folder.launch_with("env --json", variables).expect(0).json();
    let gpus = report["gpus"].as_array().unwrap();
    let find = |uuid: &str| gpus.iter().find(|gpu| gpu["uuid"] == uuid).unwrap();
    let expected = serde_json::json!({
        "index": 1,
        "name": "NVIDIA T",
        "memory_bytes": 16_384_u64 << 20,
        "driver": "550.54.15",
        "pci": "0000:f9:00.0",
        "uuid": "GPU-test-1",
        "visible": true,
    });
    assert_eq!(*find("GPU-test-1"), expected);
    assert_eq!(find("GPU-test-0")["visible"], false);

    let details = "GPU 0 NVIDIA T, 16.0 GiB driver 550.54.15, PCI 0000:f8:00.0, GPU-test-0, hidden by \
                   CUDA_VISIBLE_DEVICES";
    folder
        .launch_with("env", variables)
        .expect(0)
        .shows(details);
    let details = "GPU 0 NVIDIA T, 16.0 GiB driver 550.54.15, PCI 0000:f8:00.0, GPU-test-0";
    let ended = folder.launch_with("env", [variables[0]]);
    ended.expect(0).shows(details);
}
