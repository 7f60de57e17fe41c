//! `accel-launch bench`: what it measures is right, and what it prints can be read. No test says how
//! fast anything is.

mod support;

use serde_json::Value;

use support::{Ended, Folder, Run};

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
    assert!(number(result, "input_seconds") > 0.0, "{result}");

    // All that the loop did is in the time of the iterations or between them: the slowest rank's
    // times cover rank 0's.
    let operations = number(result, "operations_per_iteration");
    let iteration = operations * number(result, "seconds_mean") + number(result, "input_seconds");
    let said = 3.0 * iteration;
    assert!(number(result, "loop_seconds") <= said * 1.001, "{result}");

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
            assert_eq!(results[1]["operations_per_iteration"], 100, "{report}");
            assert_eq!(results[2]["operations_per_iteration"], 1, "{report}");
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
            let line = format!("--transport {transport} --warmup {warmup} --sizes 4KiB --spoil");
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
    Folder::new()
        .launch("bench all-reduce --iterations 0".split(' '))
        .expect(2);
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
