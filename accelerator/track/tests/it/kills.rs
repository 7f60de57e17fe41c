//! Programs and deliveries are killed, and each step is there once, in the journal and in what was delivered.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use accelerator_track::{
    CsvFile, Run, RunHistory, RunMark, RunStatus, Sink, TensorBoard, internal::deliver,
};
use serde::{Deserialize, Serialize};

use crate::tensorboard;

/// The variable with the role of a child process.
const ROLE: &str = "TRACK_TEST_ROLE";
const FOLDER: &str = "TRACK_TEST_FOLDER";
const STEPS: &str = "TRACK_TEST_STEPS";
const LIMIT: &str = "limit";
const CHECKPOINT_EVERY: u64 = 7;
const DEADLINE: Duration = Duration::from_secs(300);

#[test]
fn fifty_kills_leave_each_step_once() {
    let folder = tempfile::tempdir().unwrap();
    let steps = run_with_kills(folder.path(), |_| {});
    assert_has_each_step_once(folder.path(), steps);
}

/// Asserts it of the journal and of the delivered files.
pub(crate) fn assert_has_each_step_once(folder: &Path, steps: u64) {
    let runs: Vec<_> = fs::read_dir(folder.join("runs")).unwrap().collect();
    assert_eq!(runs.len(), 1, "one run, and no ghost: {runs:?}");
    let history = RunHistory::read(run_folder(folder)).unwrap();
    assert_eq!(history.status(), RunStatus::Finished);
    assert!(
        history.attempts.len() > 10,
        "{} attempts",
        history.attempts.len()
    );
    let expected: Vec<_> = (1..=steps).map(|step| (step, loss(step))).collect();
    let points = &history.series("train/loss").unwrap().points;
    let found: Vec<_> = points.iter().map(|x| (x.step, x.value)).collect();
    assert_eq!(found, expected);
    assert_eq!(csv(&run_folder(folder).join("metrics.csv")), expected);
    let events = run_folder(folder).join("tensorboard");
    tensorboard::assert_shows(&events, "train/loss", &expected);
}

#[test]
fn a_disk_that_is_full_does_not_stop_the_program_which_says_what_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    // Files cannot grow beyond 16 blocks of 512 or 1024 bytes.
    command.args(["-c", "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\""]);
    command.arg(std::env::current_exe().unwrap());
    let ended = run_as(&mut command, "full", folder.path(), 5000)
        .wait_with_output()
        .unwrap();
    assert!(ended.status.success());
    let printed = String::from_utf8_lossy(&ended.stdout);
    let said = printed
        .lines()
        .find_map(|line| line.split_once("5000 steps: "));
    let (_, said) = said.unwrap_or_else(|| panic!("{printed}"));
    assert!(said.contains("journal.jsonl"), "{said}");
    let (lost, _) = said.split_once(" entries of the run were lost").unwrap();
    // The lines that fit are there, and the program reports the loss of the others.
    let history = RunHistory::read(run_folder(folder.path())).unwrap();
    let points = &history.series("train/loss").unwrap().points;
    assert!(
        !points.is_empty() && points.len() < 5000,
        "{}",
        points.len()
    );
    // The head, the attempt, the name of the series and the end also count as entries.
    assert_eq!(history.entries + lost.parse::<u64>().unwrap(), 5004);
    assert_eq!(
        printed.matches("cannot be written now").count(),
        1,
        "{printed}"
    );
}

/// Runs a program and a delivery that are killed fifty times together, and returns the number of steps at the end.
pub(crate) fn run_with_kills(folder: &Path, mut at_kill: impl FnMut(u64)) -> u64 {
    let mut random = Random(0x5eed);
    let kills = 50;
    let steps = (kills + 1) * 100;
    let mut program = child("program", folder, steps);
    let mut sync: Option<Child> = None;
    for kill in 0..kills {
        // The program does not end, however long this takes.
        fs::write(folder.join(LIMIT), (100 * (kill + 1)).to_string()).unwrap();
        at_kill(kill);
        thread::sleep(Duration::from_millis(random.below(100)));
        match (kill % 3, sync.take()) {
            (2, Some(mut sync)) => end(&mut sync),
            (at, running) => {
                end(&mut program);
                program = child("program", folder, steps);
                sync = running;
                if at == 1 && sync.is_none() {
                    sync = Some(child("sync", folder, 0));
                }
            }
        }
    }
    end(&mut program);
    sync.iter_mut().for_each(end);
    fs::write(folder.join(LIMIT), steps.to_string()).unwrap();
    at_kill(kills);
    finish(child("program", folder, steps));
    finish(child("sync", folder, 0));
    steps
}

/// Runs as a process that the tests start, and does nothing by itself.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let steps = std::env::var(STEPS).unwrap().parse().unwrap();
    match role.as_str() {
        "program" => program(&folder, steps),
        "sync" => sync(&folder),
        "full" => full(&folder, steps),
        other => panic!("no role is called {other}"),
    }
}

#[derive(Serialize, Deserialize)]
struct Checkpoint {
    step: u64,
    mark: RunMark,
}

/// Logs one value per step, saves now and then, and resumes from its last save.
fn program(folder: &Path, steps: u64) {
    let path = folder.join("checkpoint.json");
    let checkpoint: Option<Checkpoint> = fs::read(&path)
        .ok()
        .map(|x| serde_json::from_slice(&x).unwrap());
    let runs = folder.join("runs");
    let mut builder = Run::builder("killed").runs_folder(runs).launch("one");
    for sink in sinks(folder) {
        builder = builder.sink(sink);
    }
    let from = checkpoint.as_ref().map_or(0, |x| x.step);
    if let Some(checkpoint) = &checkpoint {
        builder = builder.resume(&checkpoint.mark);
    }
    let run = builder.start().unwrap();
    for step in from + 1..=steps {
        run.log("train", [("loss", loss(step))], step, Some(epoch(step)));
        if step % CHECKPOINT_EVERY == 0 {
            let mark = run.mark().unwrap();
            let staged = path.with_extension("new");
            let checkpoint = Checkpoint { step, mark };
            fs::write(&staged, serde_json::to_vec(&checkpoint).unwrap()).unwrap();
            fs::rename(&staged, &path).unwrap();
            run.checkpoint_saved(&checkpoint.mark);
            while step > limit(folder) {
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
    run.finish().unwrap();
}

/// Returns the approximate step up to which the program may go.
fn limit(folder: &Path) -> u64 {
    let text = fs::read_to_string(folder.join(LIMIT)).unwrap_or_default();
    text.parse().unwrap_or(0)
}

/// Delivers the run as `accel-launch runs sync` does.
fn sync(folder: &Path) {
    for mut sink in sinks(folder) {
        // The program itself may be delivering.
        let deadline = Instant::now() + DEADLINE;
        while let Err(error) = deliver(run_folder(folder), &mut *sink) {
            // A server may have been killed too.
            let is_passing = error.is_conflict() || error.is_not_found() || error.is_remote();
            assert!(is_passing, "{error}");
            assert!(Instant::now() < deadline, "{error}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn full(folder: &Path, steps: u64) {
    tracing_subscriber::fmt()
        .with_writer(std::io::stdout)
        .init();
    let run = Run::builder("killed")
        .runs_folder(folder.join("runs"))
        .start()
        .unwrap();
    for step in 1..=steps {
        run.log("train", [("loss", loss(step))], step, None);
    }
    println!("{steps} steps: {}", run.finish().unwrap_err());
}

#[cfg_attr(
    not(feature = "mlflow"),
    expect(unused_variables, reason = "it says where MLflow is")
)]
fn sinks(folder: &Path) -> Vec<Box<dyn Sink>> {
    let sinks: [Box<dyn Sink>; 2] = [Box::new(CsvFile::in_run()), Box::new(TensorBoard::in_run())];
    let sinks = sinks.into_iter();
    #[cfg(feature = "mlflow")]
    let sinks = sinks.chain(crate::mlflow::sink_of(folder));
    sinks.collect()
}

pub(crate) fn loss(step: u64) -> f64 {
    1.0 / step as f64
}

pub(crate) fn epoch(step: u64) -> f64 {
    step as f64 / 100.0
}

fn csv(path: &Path) -> Vec<(u64, f64)> {
    let table = fs::read_to_string(path).unwrap();
    let rows = table.lines().skip(1).map(|row| {
        let fields: Vec<_> = row.split(',').collect();
        (fields[2].parse().unwrap(), fields[5].parse().unwrap())
    });
    rows.collect()
}

fn run_folder(folder: &Path) -> PathBuf {
    folder.join("runs/killed")
}

fn child(role: &str, folder: &Path, steps: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    run_as(&mut command, role, folder, steps)
}

fn run_as(command: &mut Command, role: &str, folder: &Path, steps: u64) -> Child {
    command
        .args(["--exact", "kills::child_process", "--nocapture"])
        .env(ROLE, role)
        .env(FOLDER, folder)
        .env(STEPS, steps.to_string())
        .stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn finish(child: Child) {
    let ended = child.wait_with_output().unwrap();
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stdout)
    );
}

fn end(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A generator of pseudorandom numbers with a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
