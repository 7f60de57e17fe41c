//! The example programs learn, and every rank reports the same result.

use std::path::Path;
use std::process::Command;

use accelerator::track::{RunHistory, RunStatus};
use accelerator_tests::processes::{
    self, Ended, example, launcher, run_ranks, run_with, wait_until,
};

/// Runs an example on one process and on two. The last line of each rank is like
/// `rank 0: loss 2.1 in the first tenth, 0.4 in the last`: the value falls by at least 30 %, and is the same on all
/// ranks. Returns the output of rank 0, alone and as one of two.
fn learns(name: &str, args: &[&str]) -> [String; 2] {
    [1, 2].map(|ranks| {
        let ended = run_well(name, args, ranks, None);
        let mut told = Vec::new();
        for (rank, ended) in ended.iter().enumerate() {
            let last = ended.stdout.lines().last().unwrap();
            let figures = last.strip_prefix(&format!("rank {rank}: ")).unwrap();
            told.push(figures.to_owned());
        }
        assert!(told.iter().all(|figures| *figures == told[0]), "{told:?}");
        let figures = told[0]
            .split([' ', ','])
            .filter_map(|word| word.parse::<f64>().ok());
        let [first, last] = figures.collect::<Vec<_>>().try_into().unwrap();
        assert!(last <= 0.7 * first, "{name} on {ranks} ranks: {}", told[0]);
        ended.into_iter().next().unwrap().stdout
    })
}

/// Runs the ranks of an example, which must succeed: in a folder, if one is given.
fn run_well(name: &str, args: &[&str], ranks: usize, folder: Option<&Path>) -> Vec<Ended> {
    let ended = run_ranks(&example(name), args, ranks, |_, command| {
        if let Some(folder) = folder {
            command.current_dir(folder);
        }
    });
    for ended in &ended {
        ended.succeeded();
    }
    ended
}

fn words(args: &str) -> Vec<&str> {
    args.split_whitespace().collect()
}

const SMALL: [&str; 6] = [
    "--limit",
    "320",
    "--batch-size",
    "8",
    "--global-batch",
    "16",
];

/// The plan of [`SMALL`] on one process and on two.
const PLANS: [&str; 2] = [
    "1 rank, 16 samples a step in 2 micro-steps; 3 epochs of 320 samples in 20 optimizer steps, 60 in all; 60 \
     steps of the learning rate",
    "2 ranks, 16 samples a step; 3 epochs of 320 samples in 20 optimizer steps, 60 in all; 60 steps of the \
     learning rate",
];

fn says(stdout: &str, line: &str) {
    assert!(
        stdout.lines().any(|found| found == line),
        "{line}\n{stdout}"
    );
}

#[test]
fn accumulation() {
    for (stdout, plan) in learns("accumulation", &SMALL).iter().zip(PLANS) {
        says(stdout, plan);
        says(stdout, "forward and backward in full precision");
    }
}

#[test]
fn accumulation_in_half_precision() {
    let args = [&SMALL[..], &["--precision", "bf16"]].concat();
    for (stdout, plan) in learns("accumulation", &args).iter().zip(PLANS) {
        says(stdout, plan);
        says(stdout, "forward and backward in bf16");
    }
}

/// The schedule is that of the whole training for any number of processes; resuming with another one would fail.
#[test]
fn accumulation_continues_at_another_number_of_processes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let args = [&SMALL[..], &["--checkpoints", folder, "--epochs", "3"]].concat();
    let ended = |ranks| run_well("accumulation", &args, ranks, None).remove(0);
    ended(2);
    // Only the checkpoint after the first epoch is left.
    for number in [2, 3] {
        std::fs::remove_dir_all(format!("{folder}/checkpoint-{number:06}")).unwrap();
    }
    let ended = ended(1);
    says(&ended.stdout, PLANS[0]);
    says(
        &ended.stdout,
        "training begins at step 20 in epoch 1, by checkpoint 1",
    );
    assert!(!ended.stderr.contains("another one"), "{}", ended.stderr);
}

/// Rank 0 alone prints the lines of the tutorials.
#[test]
fn ddp_mnist() {
    let folder = tempfile::tempdir().unwrap();
    let log_dir = folder.path().join("log");
    let args = format!("--limit 320 --epochs 2 --log-dir {}", log_dir.display());
    let args = words(&args);
    let ended = run_well("ddp_mnist", &args, 2, Some(folder.path()));
    assert_eq!(ended[1].stdout, "");
    let lines: Vec<_> = ended[0].stdout.lines().collect();
    for (line, beginning) in lines.iter().zip([
        "epoch 1/2, batch     5/5 with loss: ",
        "epoch 1/2 with val loss: ",
        "epoch 2/2, batch     5/5 with loss: ",
        "epoch 2/2 with val loss: ",
        "test loss: ",
    ]) {
        assert!(
            line.starts_with(beginning),
            "{beginning}\n{}",
            ended[0].stdout
        );
    }
    assert_eq!(lines.len(), 5, "{}", ended[0].stdout);
    let run = RunHistory::read(folder.path().join("runs/ddp_mnist")).unwrap();
    for key in [
        "train/loss",
        "val/loss",
        "val/accuracy",
        "test/loss",
        "test/accuracy",
    ] {
        assert!(run.series(key).is_some(), "{key}");
    }
    assert!(log_dir.join("ddp_mnist").is_dir());
}

/// The program of the README, which saves its model to the working directory.
#[test]
fn quickstart() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let ended = run_well("quickstart", &[], ranks, Some(folder.path()));
        let lines = ended[0].stdout.lines();
        let losses = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        let losses: Vec<_> = losses.collect();
        assert!(losses.len() == 3 && losses[2] < 0.02, "{losses:?}");
        assert!(folder.path().join("model.safetensors").is_file());
    }
}

/// Prints the banner and a row for each evaluation, and then resumes.
#[test]
fn trainer_mnist() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &str| {
        let args = words(args);
        let ended = run_well("trainer_mnist", &args, 2, Some(folder.path()));
        assert_eq!(ended[1].stdout, "");
        ended[0].stdout.clone()
    };
    let args = "--per-device-train-batch-size 16 --eval-strategy steps --eval-steps 10 --logging-steps 5 --save-steps 20 \
                --learning-rate 1e-3 --lr-scheduler-type constant --output-dir out";
    let said = run(&format!("{args} --max-steps 20"));
    for line in [
        "***** Running training *****",
        "  Num examples = 3200",
        "  Num Epochs = 1",
        "  Instantaneous batch size per device = 16",
        "  Total train batch size (w. parallel, distributed & accumulation) = 32",
        "  Gradient Accumulation steps = 1",
        "  Total optimization steps = 20",
        "  Number of trainable parameters = 1199882",
        "Step     | Training Loss | Validation Loss | Accuracy",
    ] {
        says(&said, line);
    }
    let rows = |said: &str| {
        let rows = said.lines().filter(|line| line.contains(" | ")).skip(1);
        let cells = rows.map(|row| row.split(" | ").map(|cell| cell.trim().parse().unwrap()));
        cells.map(Iterator::collect).collect::<Vec<Vec<f64>>>()
    };
    let [first, second] = rows(&said).try_into().unwrap();
    assert_eq!((first[0], second[0]), (10.0, 20.0));
    assert!(
        second[1] < first[1] && second[2] < first[2],
        "{first:?} {second:?}"
    );

    let said = run(&format!("{args} --max-steps 21 --resume-from-checkpoint"));
    let line = "  Resuming training at epoch 0.2 and global step 20";
    says(&said, line);
    assert_eq!(rows(&said).len(), 1, "{said}");
    // In half precision, inputs and outputs are cast.
    run("--per-device-train-batch-size 4 --bf16 --max-steps 3 --save-strategy no");
}

#[test]
fn learner() {
    let folder = tempfile::tempdir().unwrap();
    let artifacts = folder.path().to_str().unwrap();
    let small = [
        "--limit",
        "640",
        "--batch-size",
        "16",
        "--artifacts",
        artifacts,
    ];
    for more in [
        &["--epochs", "2"][..],
        &["--epochs", "3", "--checkpoint", "2"],
    ] {
        run_well("learner", &[&small[..], more].concat(), 2, None);
    }
    let accuracy = |epoch| -> f64 {
        let path = format!("valid/epoch-{epoch}/Accuracy.log");
        let text = std::fs::read_to_string(folder.path().join(path)).unwrap();
        let last = text.lines().last().unwrap().strip_suffix(",final");
        last.unwrap().parse().unwrap()
    };
    let accuracies = [1, 2, 3].map(accuracy);
    assert!(
        accuracies.is_sorted() && accuracies[2] > 60.0,
        "{accuracies:?}"
    );
    assert!(folder.path().join("model.safetensors").is_file());
}

#[test]
fn local_sgd() {
    let args = ["--limit", "320", "--batch-size", "8", "--period", "3"];
    learns("local_sgd", &args);
    let args = [&args[..], &["--epochs", "4", "--diloco"]].concat();
    learns("local_sgd", &args);
}

/// No example accepts a flag that has no effect on it.
#[test]
fn flags_of_other_examples_are_refused() {
    let files = ["--metrics", "--save", "--save-initial", "--log-samples"];
    for (name, flags) in [
        ("accumulation", &files[..]),
        ("big_batch", &files),
        ("cross_validation", &files),
        (
            "local_sgd",
            &["--metrics", "--save-initial", "--log-samples"],
        ),
        ("metrics", &files),
        ("mnist_plain", &["--track", "--log-dir"]),
        ("resumable", &files[2..]),
        ("streaming", &files[2..]),
    ] {
        for flag in flags {
            let mut command = Command::new(example(name));
            command.args([flag, "x"]);
            let ended = processes::run(command);
            assert_eq!(ended.status.code(), Some(2), "{name} {flag}");
            let said = format!("unexpected argument '{flag}'");
            assert!(ended.stderr.contains(&said), "{name}: {}", ended.stderr);
        }
    }
}

#[test]
fn local_sgd_saves_weights_of_the_type_that_it_is_given() {
    let folder = tempfile::tempdir().unwrap();
    for (dtype, name) in [("f32", "\"F32\""), ("f64", "\"F64\"")] {
        let file = folder.path().join(dtype);
        let mut command = Command::new(example("local_sgd"));
        let args = ["--limit", "16", "--epochs", "1", "--dtype", dtype, "--save"];
        command.args(args).arg(&file);
        processes::run(command).succeeded();
        let bytes = std::fs::read(&file).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = String::from_utf8_lossy(&bytes[8..8 + header]);
        assert!(header.contains(name), "{header}");
    }
}

#[test]
fn gan() {
    for (stdout, ranks) in learns("gan", &[]).iter().zip(["1 rank, ", "2 ranks, "]) {
        let plan = stdout.lines().next().unwrap();
        let samples = "; 20 epochs of 1024 samples in ";
        assert!(plan.starts_with(ranks) && plan.contains(samples), "{plan}");
    }
}

/// The last step is short, on one rank and on two.
#[test]
fn streaming() {
    for sharing in ["dispatched", "sharded"] {
        let args = ["--limit", "326", "--batch-size", "8", "--sharing", sharing];
        learns("streaming", &args);
    }
}

#[test]
fn metrics() {
    for stdout in learns("metrics", &["--limit", "320", "--batch-size", "8"]) {
        assert!(stdout.contains("best three"), "{stdout}");
    }
}

/// The clock of rank 0 stops both ranks.
#[test]
fn metrics_within_a_time_limit() {
    let args = ["--limit", "320", "--time-limit", "0"];
    let ended = run_well("metrics", &args, 2, None);
    let [first, second] = [0, 1].map(|rank| {
        let last = ended[rank].stdout.lines().last().unwrap();
        last.strip_prefix(&format!("rank {rank}: ")).unwrap()
    });
    assert_eq!(first, second);
    let stdout = &ended[0].stdout;
    assert!(stdout.contains("time is up"), "{stdout}");
}

#[test]
fn operator_mnist() {
    let accuracies = ["1", "2"].map(|workers| {
        let mut command = Command::new(example("operator_mnist"));
        let args = ["--limit", "640", "--epochs", "2", "--num-workers", workers];
        command.args(args).env("RAYON_NUM_THREADS", "1");
        let ended = processes::run(command);
        let epochs: Vec<&str> = ended.succeeded().lines().collect();
        assert_eq!(epochs.len(), 2, "{epochs:?}");
        assert!(epochs[1].contains("'num_samples': 640"), "{epochs:?}");
        let (_, accuracy) = epochs[1].split_once("'val_accuracy': ").unwrap();
        let (accuracy, _) = accuracy.split_once(',').unwrap();
        accuracy.parse::<f64>().unwrap()
    });
    assert!(
        accuracies.iter().all(|share| *share > 0.5),
        "{accuracies:?}"
    );
}

#[test]
fn cross_validation() {
    let args = ["--limit", "320", "--batch-size", "8", "--folds", "2"];
    for stdout in learns("cross_validation", &args) {
        // Each sample was left out and validated once.
        assert!(stdout.contains("all 320 of 320 samples"), "{stdout}");
    }
}

#[test]
fn big_batch() {
    let args = words("--limit 480 --batch-size 12 --holds 8 --global-batch 32 --lr 0.002");
    for (stdout, told) in learns("big_batch", &args).iter().zip(["4 × 8", "2 × 16"]) {
        let told = format!("memory holds 8 samples: {told} in a step");
        assert!(stdout.contains(&told), "{stdout}");
        says(stdout, "45 steps of at most 32 samples, 1440 in all");
    }
}

/// Neither the memory nor the number of processes divides 33; no division fits 37.
#[test]
fn big_batch_takes_what_it_says_or_refuses() {
    let run = |step, ranks| {
        let args = format!("--limit 330 --epochs 1 --batch-size 8 --holds 8 --global-batch {step}");
        run_ranks(&example("big_batch"), &words(&args), ranks, |_, _| ())
    };
    for (ranks, micro_steps) in [(1, "11 × 3"), (2, "3 × 11")] {
        let ended = &run("33", ranks)[0];
        assert!(ended.succeeded().contains(micro_steps), "{}", ended.stdout);
        says(&ended.stdout, "10 steps of at most 33 samples, 330 in all");
    }
    for ended in run("37", 2) {
        assert!(!ended.status.success(), "{}", ended.stdout);
        for text in [
            "a step of 37 samples cannot be divided",
            "the next size that can is 38",
        ] {
            assert!(ended.stderr.contains(text), "{}", ended.stderr);
        }
    }
}

/// Ranks share memory.
#[test]
fn recomputed_layers_of_processes_learn_the_same_as_kept_ones() {
    let run = |units: &str| {
        let ranks = run_ranks(
            &example("nlp_transformer"),
            &words("--epochs 1 --tied"),
            2,
            |_, command| {
                command.env("ACCEL_UNITS", units);
            },
        );
        let ranks = ranks.iter().map(|rank| rank.succeeded().to_owned());
        ranks.collect::<Vec<_>>()
    };
    let plain = run("plain");
    assert!(plain[0].contains("epoch 0"), "{}", plain[0]);
    for units in ["keep", "recompute", "shard"] {
        assert_eq!(run(units), plain, "{units}");
    }
}

#[test]
fn nlp_transformer() {
    let args = ["--epochs", "14", "--length", "32", "--width", "32"];
    let tied = [&args[..], &["--tied"]].concat();
    let ranks = ["1 rank, ", "2 ranks, "];
    for args in [&args[..], &tied] {
        for (stdout, ranks) in learns("nlp_transformer", args).iter().zip(ranks) {
            let plan = stdout.lines().next().unwrap();
            let is_told = plan.starts_with(ranks) && plan.contains("; 14 epochs of ");
            assert!(is_told, "{plan}");
            assert!(stdout.contains("epoch 13: "), "{stdout}");
        }
    }
}

/// Even with fewer steps than there are between two saves.
#[test]
fn resumable_saves_its_end_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let small = ["--limit", "80", "--batch-size", "8", "--epochs", "1"];
    let args = [&small[..], &["--save-every", "100", "--checkpoints", path]].concat();
    let starts = [(), ()].map(|()| {
        let stdout = run_well("resumable", &args, 1, None).remove(0).stdout;
        let folders = folder.path().read_dir().unwrap();
        let names = folders.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let checkpoints = names.filter(|name| name.starts_with("checkpoint-"));
        assert_eq!(checkpoints.count(), 1);
        let mut lines = stdout.lines();
        let begins = lines.find(|line| line.starts_with("training begins"));
        begins.unwrap().to_owned()
    });
    assert_ne!(starts[0], starts[1]);
}

#[test]
fn resumable_saves_and_leaves_on_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let args = ["--limit", "800", "--batch-size", "8", "--save-every", "1"];
    let mut command = Command::new(example("resumable"));
    command.args(args).args(["--checkpoints", path]);
    let ended = run_with(command, |pid| {
        wait_until("a checkpoint", || {
            folder.path().join("latest").exists().then_some(())
        });
        let mut kill = Command::new("kill");
        assert!(kill.arg(pid.to_string()).status().unwrap().success());
    });
    assert_eq!(ended.status.code(), Some(75), "{}", ended.stderr);
}

/// The launcher takes a slot for lost after its process has failed twice, and tries it again later.
#[test]
fn resumable_continues_live_when_a_process_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(launcher());
    command
        .args(["-n", "2:3", "--restart-delay", "0", "--regrow-after", "1"])
        .arg(example("resumable"))
        .args(["--limit", "800", "--batch-size", "8", "--track", "digits"])
        .args(["--checkpoints", "checkpoints"])
        .current_dir(folder.path())
        .env(
            "ACCEL_FAULTS",
            "rank=2 step=3 kill; rank=2 restart=1 step=5 kill",
        );
    let ended = processes::run(command);
    let (stdout, stderr) = (ended.succeeded(), &ended.stderr);
    assert!(stdout.contains("by the group before"), "{stdout}\n{stderr}");
    assert!(stdout.contains("epoch 2 validation"), "{stdout}");
    assert!(!stderr.contains("restart 3"), "{stderr}");

    let run = RunHistory::read(folder.path().join("runs/digits")).unwrap();
    let steps = run.series("train/loss").unwrap().points.iter();
    let steps: Vec<_> = steps.map(|point| point.step).collect();
    // Each step once: three epochs in steps of 16 samples, as on the two ranks that began.
    assert_eq!(steps, (1..=150).collect::<Vec<_>>());
    assert_eq!(run.status(), RunStatus::Finished);
    assert_eq!((run.attempts.len(), &*run.tags["world"]), (3, "3"));
    assert_eq!(run.system.len(), 3);
}

/// Without the flags, nothing is recorded.
#[test]
fn mnist_is_recorded_where_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let small = ["--limit", "80", "--batch-size", "8", "--epochs", "1"];
    let run = |ranks, args: &[&str]| {
        let args = [&small[..], args].concat();
        run_well("mnist", &args, ranks, Some(folder.path()));
    };
    run(2, &[]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
    run(2, &["--log-dir", "logs"]);
    run(1, &["--track", "alone"]);
    let events = folder.path().join("logs/mnist").read_dir().unwrap();
    let names = events.map(|event| event.unwrap().file_name().into_string().unwrap());
    let names: Vec<_> = names.collect();
    assert!(
        names.iter().any(|name| name.contains("tfevents")),
        "{names:?}"
    );
    for (name, ranks, steps) in [("mnist", 2, 5), ("alone", 1, 10)] {
        let run = RunHistory::read(folder.path().join("runs").join(name)).unwrap();
        let points = |key: &str| run.series(key).unwrap().points.len();
        let found = ["train/loss", "valid/accuracy", "test/loss", "test/accuracy"].map(points);
        assert_eq!(found, [steps, 1, 1, 1]);
        assert_eq!(run.attempts[0].world, ranks);
        assert_eq!(run.hyperparameters["batch_size"].value, 8);
        let provenance = &run.attempts[0].provenance;
        assert!(provenance["arguments"][1] == "--limit", "{provenance}");
    }
}
