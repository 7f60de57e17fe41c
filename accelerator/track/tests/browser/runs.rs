//! Runs with some data of every kind.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use accelerator_track::{Histogram, Run, RunHistory};
use serde_json::json;

/// A name that is markup unless it is escaped.
pub(crate) const HOSTILE: &str =
    r#"</script><script>document.title="owned"</script> "quoted" & 'é' 😀"#;

/// Writes a run that failed after a restart, with all that can be logged.
pub(crate) fn rich(runs: &Path, name: &str, lr: f64) -> RunHistory {
    let start = |attempt: u32| {
        Run::builder(name)
            .runs_folder(runs)
            .world(2)
            .tag("branch", "wide")
            .tag("note", HOSTILE)
            .provenance(json!({
                "command": ["target/release/train", "--lr", lr.to_string(), "two words"],
                "commit": { "id": "3f2a9c1d", "branch": "main", "dirty": attempt == 1 },
                "binary": { "blake3": "9d".repeat(32), "features": ["flex", "cuda"] },
                "host": { "name": "node-0", "system": "Linux 6.1", "cores": 64 },
                "devices": ["Cuda(0)", "Cuda(1)"],
                "seeds": { "data": 42, "model": 7 },
                "environment": { "RUST_LOG": "info", "ACCEL_PRECISION": "bf16" },
                "lock": "serde 1.0\nburn 0.22.1",
            }))
    };
    let run = start(0)
        .hyperparameters(&json!({
            "lr": lr, "optimizer": { "name": "AdamW", "betas": [0.9, 0.999] }, "batch_size": 64, "layers": [32, 64],
        }))
        .unwrap()
        .start()
        .unwrap();
    log(&run, lr, 1..=1500);
    let mark = run.mark().unwrap();
    run.checkpoint_saved(&mark);
    log(&run, lr, 1501..=1700);
    drop(run);
    let run = start(1).resume(&mark).start().unwrap();
    log(&run, lr, 1501..=3000);
    run.log("odd", [("values", f64::NAN)], 3001, None);
    run.log("odd", [("values", f64::INFINITY)], 3002, None);
    run.log("odd", [("values", 1.0)], 3003, None);
    run.log("odd", [("only_nan", f64::NAN)], 1, None);
    run.log(HOSTILE, [(HOSTILE, 0.125)], 7, None);
    for step in (0..=3000).step_by(300) {
        let spread = 0.2 + step as f64 / 3000.0;
        let weights = (0..4000).map(|x| normal(f64::from(x) / 4000.0) * spread);
        run.log_histogram("weights/conv1", &Histogram::of(weights, 40), step);
        run.log_text(
            "samples/poem",
            &format!("# Step {step}\n\nTo **be**, or {HOSTILE}"),
            step,
        );
    }
    run.log_image("samples/digits", include_bytes!("digit.png"), 3000)
        .unwrap();
    let curve = (0..=50).map(|x| {
        let recall = f64::from(x) / 50.0;
        [recall, 1.0 - recall.powi(6) * 0.8]
    });
    run.log_plot("test/precision", ["recall", "precision"], curve, 3000);
    let folder = run.folder().to_owned();
    run.fail(json!({ "message": "rank 1 ended by signal 9", "rank": 1, "signal": "SIGKILL" }))
        .unwrap();
    for rank in 0..2 {
        system(&folder, rank);
    }
    artifact(&folder, "input", "mnist", 3);
    artifact(&folder, "output", "model", 1);
    fs::write(folder.join("trace.json"), "{\"traceEvents\":[]}").unwrap();
    RunHistory::read(folder).unwrap()
}

/// Writes a run that finished, with a few metrics.
pub(crate) fn plain(runs: &Path, name: &str, lr: f64) -> RunHistory {
    let run = Run::builder(name).runs_folder(runs);
    let run = run
        .hyperparameters(&json!({ "lr": lr, "batch_size": 64, "depth": 3 }))
        .unwrap()
        .start()
        .unwrap();
    log(&run, lr, 1..=2500);
    let folder = run.folder().to_owned();
    run.finish().unwrap();
    artifact(&folder, "input", "model", 1);
    artifact(&folder, "output", "distilled", 1);
    RunHistory::read(folder).unwrap()
}

/// Returns a journal line that neither `Run` nor this process would write.
fn line(tag: &str, fields: &str, n: u64, ms: u64) -> String {
    let covered = format!(r#"{{"t":"{tag}","n":{n},"ms":{ms},{fields}"#);
    let checksum = crc32c::crc32c(covered.as_bytes());
    format!("{covered},\"c\":\"{checksum:08x}\"}}\n")
}

fn artifact(folder: &Path, role: &str, name: &str, version: u32) {
    let history = RunHistory::read(folder).unwrap();
    let fields = format!(
        r#""role":"{role}","name":"{name}","version":{version},"digest":"{}""#,
        "4e".repeat(32)
    );
    let line = line("artifact", &fields, history.entries, history.last_ms);
    let journal = folder.join("journal.jsonl");
    let mut journal = fs::OpenOptions::new().append(true).open(journal).unwrap();
    journal.write_all(line.as_bytes()).unwrap();
}

fn log(run: &Run, lr: f64, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        let at = step as f64;
        let noise = ((at * 12.9898 + lr * 1e4).sin() * 43758.547).fract() * 0.25;
        let epoch = at / 938.0;
        let loss = 2.3 * (-at * lr * 1.5).exp() + 0.08 + noise.abs() * (0.2 + (-at / 700.0).exp());
        run.log(
            "train",
            [("loss", loss), ("lr", lr * (1.0 - at / 4000.0))],
            step,
            epoch,
        );
        run.log(
            "train",
            [("grad_norm", 1.0 / (0.1 + at / 900.0) + noise)],
            step,
            epoch,
        );
        if step % 100 == 0 {
            let accuracy = 0.985 - 0.9 * (-at * lr * 2.0).exp() + noise * 0.02;
            run.log(
                "test",
                [("loss", loss * 0.9), ("accuracy", accuracy)],
                step,
                epoch,
            );
        }
    }
}

fn normal(x: f64) -> f64 {
    (x.clamp(1e-4, 1.0 - 1e-4) / (1.0 - x.clamp(1e-4, 1.0 - 1e-4))).ln() * 0.55
}

fn system(folder: &Path, rank: usize) {
    let place: PathBuf = folder.join("system");
    fs::create_dir_all(&place).unwrap();
    let path = place.join(format!("rank-{rank}.jsonl"));
    let mut file = fs::File::create(path).unwrap();
    let created = RunHistory::read(folder).unwrap().created_ms;
    for n in 0..120u64 {
        let cpu = 0.6 + 0.3 * ((n as f64) / 9.0 + rank as f64).sin();
        let memory = 3e9 + 1e7 * (n * (rank as u64 + 1)) as f64;
        let fields = format!(r#""values":{{"cpu":{cpu},"memory":{memory}}}"#);
        file.write_all(line("system", &fields, n, created + n * 1000).as_bytes())
            .unwrap();
    }
}
