//! `accel-launch bench` measures correctly and prints readable output. No test depends on the speed of anything.

use std::fs::File;

use serde_json::Value;

use crate::support::{Ended, Folder, Run};

/// The transports between ranks of one host.
const TRANSPORTS: [&str; 3] = ["shm", "tcp", "threads"];

fn bench(line: &str) -> Ended {
    Folder::new().launch(&format!("bench all-reduce --iterations 3 {line}"))
}

#[track_caller]
fn number(result: &Value, name: &str) -> f64 {
    let number = result[name].as_f64();
    number.unwrap_or_else(|| panic!("no {name} in {result}"))
}

/// Checks what must hold for every result.
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
}

#[test]
fn every_transport_is_measured_on_two_ranks_and_three() {
    for transport in TRANSPORTS {
        for ranks in [2, 3] {
            let ended = bench(&format!(
                "-n {ranks} --transport {transport} --sizes 4B,4KiB,100KB,1MiB --json"
            ))
            .expect(0);
            let report = ended.json();
            assert_eq!(report["num_processes"], ranks, "{report}");
            assert_eq!(report["transport"], transport, "{report}");
            let results = report["results"].as_array().unwrap();
            let sizes: Vec<_> = results.iter().map(|result| &result["bytes"]).collect();
            assert_eq!(sizes, [4, 4096, 100_000, 1 << 20], "{report}");
            for result in results {
                assert_eq!(result["dtype"], "f32", "{report}");
                check(result, ranks);
            }
        }
    }
}

#[test]
fn every_type_is_measured() {
    let types = "bf16,f16,f32,f64";
    let ended = bench(&format!("--dtype {types} --sizes 48KB --json")).expect(0);
    let report = ended.json();
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
fn people_get_a_table() {
    let text = bench("--transport tcp --sizes 4KiB,25KB").expect(0).text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains("2 rank(s) over tcp"), "{text}");
    assert!(lines[2].contains("of bound"), "{text}");
    assert!(lines[3].trim_start().starts_with("4096  f32"), "{text}");
    assert!(lines[4].trim_start().starts_with("25000  f32"), "{text}");
    assert_eq!(lines.len(), 5, "{text}");
}

#[test]
fn nonsense_is_refused() {
    for (line, says) in [
        ("--sizes 4KiBs", "whole number of bytes"),
        ("--sizes 0", "whole number of bytes"),
        ("--sizes 1KiB,,2KiB", "whole number of bytes"),
        (
            "--sizes 6",
            "--sizes 6 is no whole number of f32, which takes 4 bytes",
        ),
        ("--sizes 900000GiB", "of memory available"),
        ("--dtype i8", "expected one of bf16, f16, f32, f64"),
        ("--transport pigeons", "\"pigeons\" is no transport"),
        ("--sizes 1M", "whole number of bytes"),
        ("-n 1", "expected a number of processes from 2 to 127"),
        ("-n 128", "expected a number of processes from 2 to 127"),
        ("-n two", "expected a number of processes from 2 to 127"),
    ] {
        let ended = bench(line).expect(2);
        assert!(ended.stdout.is_empty(), "{ended:?}");
        ended.says(says);
    }
    Folder::new().launch("bench").expect(2);
    Folder::new().launch("bench all-gather").expect(2);
    for count in ["0", "-1", "99999999999999999999999"] {
        let line = format!("bench all-reduce --iterations={count}");
        Folder::new().launch(&line).expect(2);
    }
}

#[test]
fn devices_are_refused_that_cannot_reduce() {
    let ended = bench("--device cuda --transport threads").expect(2);
    assert!(ended.stdout.is_empty(), "{ended:?}");
    ended.says("leave one of them out");
    bench("--device npu")
        .expect(2)
        .says("possible values: cpu, cuda");
}

#[test]
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
#[ignore = "needs an NVIDIA GPU"]
fn gpus_are_measured() {
    let types = "bf16,f16,f32,f64";
    let line = format!("-n 1 --device cuda --sizes 64B,1MiB --dtype {types} --json");
    let report = bench(&line).expect(0).json();
    assert_eq!(
        report["gpus"]["bus_ids"].as_array().unwrap().len(),
        1,
        "{report}"
    );
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), 8, "{report}");
    for result in results {
        assert!(number(result, "seconds") > 0.0, "{result}");
        assert_eq!(number(result, "bus_bandwidth"), 0.0, "{result}");
        assert!(result["bound_seconds"].is_null(), "{result}");
    }
    let ended = bench("-n 32 --device cuda --sizes 4KiB").expect(1);
    ended.says("NCCL takes one rank a GPU");
}

#[test]
fn output_that_cannot_be_written_is_an_error() {
    for transport in TRANSPORTS {
        for form in ["--json", "--dtype=f64"] {
            let folder = Folder::new();
            let command = folder.command(&format!(
                "bench all-reduce --sizes 4KiB --iterations 2 --transport {transport} {form}"
            ));
            let full = File::options().write(true).open("/dev/full").unwrap();
            let ended = Run::start_into(command, full.into()).end();
            ended
                .expect(1)
                .says("standard output cannot be written: No space left on device");
        }
    }
}

#[test]
fn by_default_two_ranks_choose_a_transport_and_the_table_has_every_field() {
    // A launch that it runs in is not joined.
    let launch = [("RANK", "7"), ("WORLD_SIZE", "9"), ("LOCAL_RANK", "7")];
    let line = "bench all-reduce --iterations 2 --sizes 4KiB --json";
    let report = Folder::new().launch_with(line, launch).expect(0).json();
    assert_eq!(report["num_processes"], 2);
    // Ranks fall back if the kernel gives no memory to share.
    let chosen = report["transport"].as_str().unwrap();
    assert!(["shm", "tcp"].contains(&chosen), "{report}");
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
    let text = Folder::new().ok("bench all-reduce --help");
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
    let text = Folder::new().ok("bench --help");
    assert!(text.contains("all-reduce"), "{text}");
}
