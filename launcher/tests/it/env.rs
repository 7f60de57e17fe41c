//! `accel-launch env`.

use crate::support::Folder;

#[test]
fn json_tells_what_is_there() {
    let folder = Folder::new();
    let report = folder.json("env --json");
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
fn the_launcher_that_tells_the_place_is_shown_with_the_others() {
    let folder = Folder::new();
    let mpi = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_NAMESPACE", "1"),
        ("SLURM_PROCID", "0"),
    ];
    let report = folder.launch_with("env --json", mpi).expect(0).json();
    assert_eq!(report["launcher"]["name"], "Open MPI");
    assert_eq!(report["launchers_noticed"][0]["variable"], "SLURM_PROCID");
    assert_eq!(report["topology"], "rank 1 of 2 (local 1 of 2)");
    folder
        .launch_with("env", mpi)
        .expect(0)
        .shows("launcher Open MPI OMPI_COMM_WORLD_RANK")
        .shows("launcher Slurm, not used SLURM_PROCID");

    let pod = [("JOB_COMPLETION_INDEX", "1")];
    let report = folder.launch_with("env --json", pod).expect(0).json();
    assert_eq!(report["launcher"], serde_json::json!(null));
    assert_eq!(report["agent"]["node"], 1);
    assert_eq!(report["agent"]["engine"]["name"], "an Indexed Job");
    // The rank comes over a connection, which no program serves here.
    let asked = [("PMI_PORT", "127.0.0.1:1"), ("PMI_ID", "0")];
    let text = folder.launch_with("env", asked).expect(1).text();
    assert!(text.contains("error: PMI_PORT=127.0.0.1:1"), "{text}");
}

#[test]
fn settings_have_origins() {
    let folder = Folder::new();
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("OMP_NUM_THREADS", "3"),
    ];
    folder
        .launch_with("env", variables)
        .expect(0)
        .shows("rank 1 RANK")
        .shows("world size 2 WORLD_SIZE")
        .shows("store port 29500 MASTER_PORT")
        .shows("OMP_NUM_THREADS 3 environment");
}

#[test]
fn errors_in_the_environment_are_shown() {
    let folder = Folder::new();
    for line in ["env", "env --json"] {
        let variables = [("RANK", "banana"), ("WORLD_SIZE", "2")];
        let ended = folder.launch_with(line, variables).expect(1);
        let text = ended.text();
        assert!(text.contains("RANK") && text.contains("banana"), "{text}");
        if line == "env --json" {
            let report = ended.json();
            assert_eq!(report["errors"].as_array().unwrap().len(), 1);
            assert!(report["topology"].is_null());
        }
    }
}

/// Variables that every rank would refuse.
const WRONG: [(&str, &str); 6] = [
    ("ACCEL_OVERLAP", "yes"),
    ("ACCEL_COMPRESSION", "fp16"),
    ("ACCEL_TRACE", "/no/such/folder/x.json"),
    ("ACCEL_DEVICE", "tpu"),
    ("ACCEL_TRANSPORT", "pigeons"),
    ("ACCEL_FOO", "banana"),
];

#[test]
fn wrong_variables_are_errors_in_every_command() {
    let folder = Folder::new();
    folder.script("ran.sh", "echo ran >> ran");
    for (name, value) in WRONG {
        for (line, code) in [
            ("env --json", 1),
            ("--dry-run -n 2 ran.sh", 2),
            ("-n 2 ran.sh", 2),
            ("bench all-reduce --sizes 4KiB --iterations 2", 2),
            (
                "bench all-reduce --sizes 4KiB --iterations 2 --transport threads",
                2,
            ),
        ] {
            let ended = folder.launch_with(line, [(name, value)]).expect(code);
            if code == 2 {
                assert!(ended.stdout.is_empty(), "{line}: {ended:?}");
                assert_eq!(ended.stderr.lines().count(), 1, "{line}: {ended:?}");
                ended.says(name).says("; expected ");
            } else {
                let report = ended.json();
                let errors = report["errors"].as_array().unwrap();
                assert_eq!(errors.len(), 1, "{report}");
                assert!(errors[0].as_str().unwrap().contains(name), "{report}");
            }
        }
    }
    assert!(!folder.path().join("ran").exists());
}

#[test]
fn variables_that_are_not_set_are_listed_with_their_defaults() {
    let report = Folder::new().json("env --json");
    let settings = report["settings"].as_array().unwrap();
    for (name, default) in [("ACCEL_OVERLAP", "auto"), ("ACCEL_COMPRESSION", "none")] {
        let entry = settings.iter().find(|entry| entry["name"] == name).unwrap();
        assert_eq!(entry["value"], default, "{entry}");
        assert_eq!(entry["origin"], "default", "{entry}");
        assert_eq!(entry["read_by"], "ranks", "{entry}");
        assert!(entry["expected"].is_string(), "{entry}");
    }
}

#[test]
fn a_dry_run_lists_what_ranks_get_by_default() {
    let folder = Folder::new();
    folder.script("run.sh", "true");
    let variables = [("MALLOC_TOP_PAD_", "7"), ("ACCEL_OVERLAP", "off")];
    let ended = folder.launch_with("--dry-run -n 2 run.sh", variables);
    let rows = ended.expect(0).lines();
    let row = |name: &str| rows.iter().find(|row| row.starts_with(name)).unwrap();
    assert_eq!(row("MALLOC_TOP_PAD_"), "MALLOC_TOP_PAD_ 7 environment");
    assert_eq!(row("ACCEL_OVERLAP"), "ACCEL_OVERLAP off environment");
    assert!(row("GLIBC_TUNABLES").contains("glibc.malloc.hugetlb=1 default"));
    assert!(row("MALLOC_TRIM_THRESHOLD_").contains("4294967296 default"));
    assert!(row("PYTHONUNBUFFERED").contains("1 default"));
}

#[test]
fn an_empty_variable_is_not_set() {
    let folder = Folder::new();
    folder.script("rank.sh", "echo rank $RANK");
    let empty = [
        "ACCEL_ACCUMULATION_STEPS",
        "ACCEL_DEVICE",
        "ACCEL_FAULTS",
        "ACCEL_JOB",
        "ACCEL_LIVENESS_TIMEOUT",
        "ACCEL_NO_SUCH_VARIABLE",
        "ACCEL_TOKEN_FILE",
        "ACCEL_TRANSPORT",
        "OMP_NUM_THREADS",
        "RANK",
        "WORLD_SIZE",
    ];
    let empty = empty.map(|name| (name, ""));
    let run = |line: &str| folder.launch_with(line, empty).expect(0).text();
    assert_eq!(run("env"), folder.ok("env"));
    assert_eq!(run("-n 1 --no-prefix rank.sh"), "rank 0\n");
}
