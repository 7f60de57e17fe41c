//! `accel-launch bench`: what it measures is right, and what it prints can be read. No test says how
//! fast anything is.

use std::fs::File;

use serde_json::Value;

use crate::support::{Ended, Folder, Run};

/// How ranks of one host can be connected.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "threads"];

fn bench(line: &str) -> Ended {
    let words = "bench all-reduce --warmup 1 --iterations 3 ".to_owned() + line;
    Folder::new().launch(words.split_whitespace())
}

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.text()).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

#[track_caller]
fn number(result: &Value, name: &str) -> f64 {
    let number = result[name].as_f64();
    number.unwrap_or_else(|| panic!("no {name} in {result}"))
}

/// What must hold of every result.
#[track_caller]
fn check(result: &Value, ranks: usize) {
    let seconds = number(result, "seconds");
    assert!(seconds > 0.0, "{result}");
    assert!(number(result, "seconds_min") <= seconds, "{result}");
    assert!(number(result, "seconds_p95") >= seconds, "{result}");
    let close = |name: &str, expected: f64| {
        let found = number(result, name);
        assert!((found / expected - 1.0).abs() < 1e-9, "{name}: {result}");
    };
    let ranks_number = ranks as f64;
    let bandwidth = number(result, "bytes") / seconds;
    close("algorithm_bandwidth", bandwidth);
    let factor = 2.0 * (ranks_number - 1.0) / ranks_number;
    close("bus_bandwidth", factor * bandwidth);
    close("bound_fraction", number(result, "bound_seconds") / seconds);
    assert_eq!(number(result, "iterations"), 3.0, "{result}");
    assert_eq!(number(result, "blocks"), 3.0, "{result}");
    close("seconds_mean", number(result, "loop_seconds") / 3.0);
    let checksums = result["checksums"].as_array();
    let checksums = checksums.unwrap_or_else(|| panic!("no checksums in {result}"));
    assert_eq!(checksums.len(), ranks, "{result}");
    assert!(checksums.iter().all(|sum| sum == &checksums[0]), "{result}");
}

#[test]
fn every_transport_is_measured_on_two_ranks_and_three() {
    for transport in TRANSPORTS {
        let mut sums = Vec::new();
        for ranks in [2, 3] {
            let ended = bench(&format!(
                "-n {ranks} --transport {transport} --sizes 4B,4KiB,100KB,1MiB --json"
            ))
            .expect(0);
            let report = json(&ended);
            assert_eq!(report["num_processes"], ranks, "{report}");
            assert_eq!(report["transport"], transport, "{report}");
            assert_eq!(report["call"], "buffer", "{report}");
            let bound = report["bound"].as_str().unwrap();
            assert!(bound.contains("num_processes arrays"), "{report}");
            let results = report["results"].as_array().unwrap();
            let sizes: Vec<_> = results.iter().map(|result| &result["bytes"]).collect();
            assert_eq!(sizes, [4, 4096, 100_000, 1 << 20], "{report}");
            for result in results {
                assert_eq!(result["dtype"], "f32", "{report}");
                check(result, ranks);
            }
            sums.push(results[3]["checksums"][0].clone());
        }
        assert_ne!(sums[0], sums[1], "{transport}: as many ranks, so much more");
    }
}

#[test]
fn the_sums_do_not_depend_on_the_transport() {
    let sums = TRANSPORTS.map(|transport| {
        let line = format!("--transport {transport} --sizes 64KiB,1MB --json");
        let report = json(&bench(&line).expect(0));
        [0, 1].map(|result| report["results"][result]["checksums"][0].clone())
    });
    assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
}

#[test]
fn the_transport_that_was_chosen_is_told() {
    let report = json(&bench("--sizes 4KiB --json").expect(0));
    // Where the kernel gives no memory to share, ranks fall back.
    let chosen = report["transport"].as_str().unwrap();
    assert!(["shm", "tcp"].contains(&chosen), "{report}");
    assert_ne!(report["bound_memory"], "", "{report}");
}

#[test]
fn every_type_is_measured() {
    let types = "bf16,f16,f32,f64,i8,i16,i32,i64,u8,u16,u32,u64";
    let ended = bench(&format!("--dtype {types} --sizes 48KB --json")).expect(0);
    let report = json(&ended);
    let results = report["results"].as_array().unwrap();
    let found: Vec<_> = results
        .iter()
        .map(|result| result["dtype"].as_str().unwrap())
        .collect();
    assert_eq!(found.join(","), types);
    for result in results {
        check(result, 2);
    }
}

#[test]
fn every_call_is_measured() {
    for call in ["buffer", "slice", "started"] {
        let ended = bench(&format!("--call {call} --sizes 4KiB,1MiB --json")).expect(0);
        let report = json(&ended);
        assert_eq!(report["call"], call, "{report}");
        for result in report["results"].as_array().unwrap() {
            check(result, 2);
        }
    }
}

#[test]
fn people_get_a_table() {
    let text = bench("--transport tcp --sizes 4KiB,25KB").expect(0).text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("2 ranks over tcp"), "{text}");
    assert!(lines[2].contains("of bound"), "{text}");
    assert!(lines[3].trim_start().starts_with("4 KiB  f32"), "{text}");
    assert!(lines[4].trim_start().starts_with("25 KB  f32"), "{text}");
    assert_eq!(lines.len(), 5, "{text}");
}

#[test]
fn a_wrong_sum_is_an_error() {
    for transport in TRANSPORTS {
        for warmup in ["0", "1"] {
            let line = format!("--transport {transport} --warmup {warmup} --sizes 4KiB --sabotage");
            let line = "bench all-reduce --json --iterations 3 ".to_owned() + &line;
            let ended = Folder::new().launch(line.split_whitespace()).expect(1);
            assert!(ended.stdout.is_empty(), "{ended:?}");
            ended.says("is wrong on rank");
        }
    }
}

#[test]
fn nonsense_is_refused() {
    for (line, says) in [
        ("--sizes 4KiBs", "\"KiBs\" is no unit"),
        ("--sizes 0", "at least 1 byte"),
        ("--sizes 1KiB,,2KiB", "whole number of bytes"),
        (
            "--sizes 6",
            "--sizes 6 is no whole number of f32, which takes 4 bytes",
        ),
        ("--sizes 900TiB", "of memory available"),
        ("--dtype f33", "expected one of bf16, f16"),
        ("--transport pigeons", "\"pigeons\" is no transport"),
        ("--sizes 1M", "write MB for powers of 1000, or MiB"),
        ("-n 1", "expected a number of processes from 2 to 32"),
        ("-n 33", "expected a number of processes from 2 to 32"),
        ("-n two", "expected a number of processes from 2 to 32"),
        ("--call me", "possible values: buffer, slice, started"),
    ] {
        let ended = bench(line).expect(2);
        assert!(ended.stdout.is_empty(), "{ended:?}");
        ended.says(says);
    }
    Folder::new().launch(["bench"]).expect(2);
    Folder::new().launch(["bench", "all-gather"]).expect(2);
    for (line, least) in [
        ("--iterations 0", 1),
        ("--iterations 1000000001", 1),
        ("--iterations -1", 1),
        ("--warmup 1000000001", 0),
        ("--warmup 99999999999999999999999", 0),
    ] {
        let line = "bench all-reduce ".to_owned() + line;
        Folder::new()
            .launch(line.split(' '))
            .expect(2)
            .says(&format!("of operations from {least} to 1000000000"));
    }
}

#[test]
fn gpus_need_a_build_that_knows_them_and_what_they_reduce() {
    let cases: &[(&str, &str)] = match cfg!(feature = "cuda") {
        true => &[
            (
                "--device cuda --dtype i16",
                "--dtype i16 is not reduced on GPUs",
            ),
            ("--device cuda --transport threads", "leave one of them out"),
            (
                "--device cuda --call slice",
                "leave it out with --device cuda",
            ),
        ],
        false => &[
            ("--device cuda", "--features cuda"),
            ("-n 1 --device cuda", "--features cuda"),
        ],
    };
    for (line, says) in cases {
        let ended = bench(line).expect(2);
        assert!(ended.stdout.is_empty(), "{ended:?}");
        ended.says(says);
    }
    bench("--device npu")
        .expect(2)
        .says("possible values: cpu, cuda");
}

#[test]
#[cfg(feature = "cuda")]
fn without_a_gpu_every_rank_says_what_is_missing() {
    if std::path::Path::new("/proc/driver/nvidia").exists() {
        return;
    }
    for line in [
        "-n 1 --device cuda --sizes 4KiB",
        "--device cuda --sizes 4KiB",
    ] {
        let ended = bench(line).expect(1);
        assert!(ended.stdout.is_empty(), "{ended:?}");
        ended.says("is not there: no libcuda.so.1 or libcuda.so could be loaded");
    }
}

#[test]
#[cfg(feature = "cuda")]
#[ignore = "needs an NVIDIA GPU"]
fn gpus_are_measured() {
    let types = "bf16,f16,f32,f64,i8,i32,i64,u8,u32,u64";
    let line = format!("-n 1 --device cuda --sizes 64B,1MiB --dtype {types} --json");
    let report = json(&bench(&line).expect(0));
    assert_eq!(
        report["gpus"]["bus_ids"].as_array().unwrap().len(),
        1,
        "{report}"
    );
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 20, "{report}");
    for result in results {
        assert!(number(result, "seconds") > 0.0, "{result}");
        assert_eq!(number(result, "bus_bandwidth"), 0.0, "{result}");
        assert!(result["bound_seconds"].is_null(), "{result}");
    }
    let ended = bench("-n 1 --device cuda --sizes 4KiB --sabotage").expect(1);
    ended.says("is wrong on rank 0");
    let ended = bench("-n 32 --device cuda --sizes 4KiB").expect(1);
    ended.says("NCCL takes one rank a GPU");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for transport in TRANSPORTS {
        for form in ["--json", "--call=slice"] {
            let folder = Folder::new();
            let mut command = folder.launcher();
            let line = format!(
                "bench all-reduce --sizes 4KiB --iterations 2 --transport {transport} {form}"
            );
            command.args(line.split(' '));
            let full = File::options().write(true).open("/dev/full").unwrap();
            let ended = Run::start_into(command, full.into()).end();
            ended
                .expect(1)
                .says("standard output cannot be written: No space left on device");
        }
    }
}

#[test]
fn the_transport_that_was_asked_for_is_told() {
    let report = json(&bench("--transport hierarchical --sizes 4KiB --json").expect(0));
    assert_eq!(report["asked"], "hierarchical", "{report}");
    assert_eq!(report["transport"], "shm", "{report}");
    let text = bench("--transport hierarchical --sizes 4KiB")
        .expect(0)
        .text();
    let remark = "over shm (asked for hierarchical; one host, so shm)";
    assert!(text.contains(remark), "{text}");
}

#[test]
fn every_field_of_the_json_is_in_the_table() {
    let report = json(&bench("--sizes 4KiB --json").expect(0));
    assert!(report["cores"].as_u64() >= Some(1), "{report}");
    if cfg!(target_os = "linux") {
        assert!(report["load_1m"].is_number(), "{report}");
    }
    let table = include_str!("../../src/commands/bench/README.md");
    let table: Vec<&str> = table.lines().filter(|line| line.starts_with('|')).collect();
    for object in [&report, &report["results"][0]] {
        for name in object.as_object().unwrap().keys() {
            let name = format!("`{name}`");
            let fields = |row: &str| row.split('|').nth(1).unwrap_or_default().to_owned();
            assert!(
                table.iter().any(|row| fields(row).contains(&name)),
                "{name}"
            );
        }
    }
}

#[test]
fn help_says_what_is_timed_and_what_the_bound_is() {
    let text = Folder::new()
        .launch(["bench", "all-reduce", "--help"])
        .expect(0)
        .text();
    for words in [
        "slowest rank",
        "`bytes` read",
        "2 (N - 1) / N",
        "--transport",
        "launcher/src/commands/bench",
        "Exit code",
    ] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
    let text = Folder::new().launch(["bench", "--help"]).expect(0).text();
    assert!(text.contains("all-reduce"), "{text}");
}

#[test]
fn a_launch_that_it_runs_in_is_not_joined() {
    let folder = Folder::new();
    let mut command = folder.launcher();
    command
        .args("bench all-reduce --iterations 2 --sizes 4KiB --json".split(' '))
        .envs([("RANK", "7"), ("WORLD_SIZE", "9"), ("LOCAL_RANK", "7")]);
    let report = json(&Run::start(command).end().expect(0));
    assert_eq!(report["num_processes"], 2);
}
