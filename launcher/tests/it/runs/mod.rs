//! `accel-launch runs`.

mod collect;
mod deliver;
mod failure;
mod look;
mod reproduce;

use std::path::PathBuf;

use accelerator_track::{Run, RunBuilder};
use serde_json::json;

use crate::support::Folder;

/// Returns the builder of a run of this name below `runs`.
fn builder(folder: &Folder, name: &str) -> RunBuilder {
    Run::builder(name).runs_folder(folder.path().join("runs"))
}

/// Writes a finished run with three steps of two metrics, the last of which is NaN, and a table of one value.
fn finished(folder: &Folder, name: &str, lr: f64) -> PathBuf {
    let run = builder(folder, name)
        .hyperparameters(&json!({ "lr": lr, "model": { "layers": [32, 64] } }))
        .unwrap()
        .tag("group", "a")
        .world(2)
        .start()
        .unwrap();
    for step in 1..=3_u32 {
        let loss = lr / f64::from(step);
        run.log(
            "train",
            [("loss", loss), ("odd", f64::NAN)],
            step.into(),
            0.5,
        );
    }
    run.log_means("test", [("accuracy", 0.9, 10_000)], 3, 1.0);
    run.log_text("note/sample", "To be", 3);
    let path = run.folder().to_owned();
    run.finish().unwrap();
    path
}

/// Writes a run that resumes from the checkpoint at step 2 after step 3 was logged.
fn resumed(folder: &Folder, name: &str) -> PathBuf {
    let run = builder(folder, name).start().unwrap();
    run.log("train", [("loss", 1.0)], 1, None);
    run.log("train", [("loss", 0.5)], 2, None);
    let mark = run.mark().unwrap();
    run.checkpoint_saved(&mark);
    run.log("train", [("loss", 0.4)], 3, None);
    drop(run);
    let run = builder(folder, name).resume(&mark).start().unwrap();
    run.log("train", [("loss", 0.25)], 3, None);
    let path = run.folder().to_owned();
    run.fail(json!({ "message": "out of\u{1b}[2J memory" }))
        .unwrap();
    path
}

fn json_of(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}
