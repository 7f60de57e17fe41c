use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use accelerator_host::machine::UsableCores;
use accelerator_tune::{
    Asha, CheckpointSettings, Config, Display, Mode, Objective, Results, Search, SearchEnd,
    SearchFolder, Searcher, Space, Stop, TrialId, TrialStatus, grid_search,
};
use serde_json::{Value, json};

use crate::support::{assert_nothing_left, processes};

/// Returns a search of a shell script whose arguments include the trial's folder.
fn programs(folder: &Path, trials: u32) -> Search {
    let points = (0..i64::from(trials)).map(Into::into);
    Search::new("programs", Objective::new("loss", Mode::Min))
        .space(Space::new([("x", grid_search(points))]))
        .folder(folder.join("search"))
        .slots(2)
        .display(Display::Quiet)
        .interrupted_by(Arc::new(AtomicU32::new(0)))
}

fn run(search: Search, folder: &Path, script: &str) -> Results {
    let folder = folder.display().to_string();
    search
        .run_programs(["sh", "-c", script, &folder, "{x}", "{folder}"])
        .unwrap()
}

#[test]
fn what_a_program_leaves_behind_does_not_hold_its_trial() {
    let folder = tempfile::tempdir().unwrap();
    for escape in ["", "setsid"] {
        let path = folder.path().join(format!("left{escape}"));
        let begun = Instant::now();
        let script =
            format!("printf '{{{{\"loss\": 1}}}}\n'; {escape} sh -c 'sleep 40; :' \"$0\" & exit 0");
        let results = run(programs(&path, 1), &path, &script);
        assert_eq!(results.trials()[0].status, TrialStatus::Terminated);
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "{escape}: {:?}",
            begun.elapsed()
        );
        if escape.is_empty() {
            assert_nothing_left(&path);
        }
        for pid in processes(&path) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
    }
}

#[test]
fn a_program_is_bound_to_the_cores_of_its_slot_and_the_search_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let before = UsableCores::of_this_process();
    let script = r#"sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status > "$2/cores"
                    printf '{{"loss": %s}}\n' "$OMP_NUM_THREADS""#;
    let results = run(programs(folder.path(), 2), folder.path(), script);
    for trial in results.trials() {
        let cores = fs::read_to_string(trial.folder.join("cores")).unwrap();
        let core: Option<usize> = cores.trim().parse().ok();
        // If a quota grants fewer cores than there are, the system chooses.
        let is_bound = core.is_some_and(|core| before.numbers().contains(&core));
        assert!(is_bound || before.numbers().is_empty(), "{cores}");
    }
    let after = UsableCores::of_this_process();
    assert_eq!(after.numbers(), before.numbers());
}

#[test]
fn a_metric_that_no_trial_reports_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let reports = ["echo", r#"{{"loss": {x}, "acc": 1}}"#];
    let of_metric = |metric: &str| Asha {
        metric: Some(metric.to_owned()),
        ..Asha::default()
    };
    let search = || programs(folder.path(), 2).slots(1);
    for (search, place, metric, meant) in [
        (
            search().scheduler(of_metric("accuracy")),
            "scheduler.metric",
            "accuracy",
            ".",
        ),
        (
            search().stop(Stop::new().iterations(3).at_least("epoch", 3.0)),
            "stop",
            "epoch",
            ".",
        ),
        (
            search().stop(Stop::new().iterations(3).at_least("ac", 3.0)),
            "stop",
            "ac",
            "; did you mean `acc`?",
        ),
    ] {
        let error = search.run_programs(reports).unwrap_err();
        assert!(error.is_misuse(), "{error}");
        let said = format!(
            "`{place}` names the metric `{metric}`, and trial 00000 has reported without it: acc, loss{meant}"
        );
        assert!(error.to_string().starts_with(&said), "{error}");
    }
    // The same folder can be used again.
    let results = search().scheduler(of_metric("acc")).run_programs(reports);
    assert_eq!(results.unwrap().ending(), SearchEnd::Finished);
    let sparse = programs(&folder.path().join("sparse"), 2)
        .scheduler(of_metric("accuracy"))
        .disable_strict_metric_checking();
    let results = sparse.run_programs(reports).unwrap();
    assert_eq!(results.ending(), SearchEnd::Finished);
}

/// A searcher that suggests a number once.
struct Once(u64);

impl Searcher for Once {
    fn ask(&mut self, trial: TrialId) -> accelerator_tune::Result<Option<Config>> {
        let config = serde_json::from_value(json!({ "x": 1 })).unwrap();
        Ok((trial.number() == 0).then_some(config))
    }

    fn config(&self) -> Value {
        json!({ "once": self.0 })
    }
}

#[test]
fn a_search_is_not_resumed_with_another_searcher() {
    let folder = tempfile::tempdir().unwrap();
    let run = |search: Search| search.run_programs(["echo", r#"{{"loss": {x}}}"#]);
    let search = || programs(folder.path(), 1);
    run(search().searcher(Once(3))).unwrap();
    run(search().searcher(Once(3))).unwrap();
    let error = run(search().searcher(Once(4))).unwrap_err();
    assert!(error.is_conflict(), "{error}");
    let said = r#"its `search_alg` is {"searcher":{"once":3},"type":"custom"}, and now {"searcher":{"once":4}"#;
    assert!(error.to_string().contains(said), "{error}");
    assert!(run(search()).unwrap_err().is_conflict());
    let before = SearchFolder::open(folder.path().join("search")).unwrap();
    let error = run(before.spec().clone().into()).unwrap_err();
    assert!(error.is_misuse(), "{error}");
    assert!(
        error.to_string().contains("by `Search::searcher`"),
        "{error}"
    );
}

#[test]
fn a_program_that_does_not_end_is_ended_while_others_report() {
    let folder = tempfile::tempdir().unwrap();
    // Trial 0 should stop at its second report and does not, and trial 1 reports until it is gone.
    let script = r#"
        if [ $1 = 0 ]; then
            trap '' TERM
            printf '{{"loss": 0}}\n{{"loss": 0}}\n'
            while [ ! -e "$2/never" ]; do sleep 0.1; done
        fi
        for i in $(seq 1200); do
            printf '{{"loss": 1}}\n'
            sleep 0.01
            [ $(($i % 50)) = 0 ] && ! pgrep -f "$0 0 " > /dev/null && exit 0
        done
        exit 7"#;
    let search = programs(folder.path(), 2).stop(Stop::new().at_most("loss", 0.5));
    let results = run(search, folder.path(), script);
    let statuses: Vec<_> = results.trials().iter().map(|trial| trial.status).collect();
    assert_eq!(
        statuses,
        [TrialStatus::Terminated; 2],
        "{:?}",
        results.trials()[1].error
    );
}

#[test]
fn a_program_that_names_what_is_not_in_its_folder_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let own = folder.path().join("own");
    fs::create_dir(&own).unwrap();
    fs::write(own.join("precious"), "data").unwrap();
    let script = r#"
        case $1 in 0) path=$0/own;; 1) path=$2/..;; *) path=$2;; esac
        printf '{{"loss": 1, "checkpoint": "%s/nothing"}}\n' "$path"
        printf '{{"loss": 1, "checkpoint": "%s"}}\n' "$path""#;
    let results = run(programs(folder.path(), 3), folder.path(), script);
    for trial in results.trials() {
        assert_eq!(trial.last.as_ref().unwrap().training_iteration, 1);
        assert_eq!(trial.status, TrialStatus::Error);
        let error = trial.error.as_deref().unwrap();
        assert!(error.contains("is not in its folder"), "{error}");
        assert!(trial.folder.join("params.json").is_file());
    }
    assert_eq!(fs::read_to_string(own.join("precious")).unwrap(), "data");
}

/// A program runs ahead, so the path may hold the state of a later report.
#[test]
fn a_program_that_names_a_checkpoint_twice_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        for i in 1 2 3; do
            echo $i > "$2/last"
            printf '{{"loss": 1, "checkpoint": "%s"}}\n' "$2/last"
        done"#;
    let results = run(programs(folder.path(), 1), folder.path(), script);
    let trial = &results.trials()[0];
    assert_eq!(trial.status, TrialStatus::Error);
    let error = trial.error.as_deref().unwrap();
    assert!(error.contains("/last twice"), "{error}");
    assert!(error.contains("under a new name"), "{error}");
}

#[test]
fn what_settings_do_not_ask_for_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        for i in 1 2 3; do
            echo $i > "$2/at$i"
            printf '{{"loss": 1, "checkpoint": "%s"}}\n' "$2/at$i"
        done"#;
    let search = programs(folder.path(), 1).checkpoints(CheckpointSettings {
        frequency: Some(2),
        ..CheckpointSettings::default()
    });
    let results = run(search, folder.path(), script);
    let trial = &results.trials()[0];
    let kept = trial.checkpoint.as_ref().unwrap();
    assert!(kept.join("at2").is_file());
    assert!(!trial.folder.join("at3").exists());
}

/// In the first attempt, each step waits until the search has taken the checkpoint of the step before.
#[test]
fn what_a_program_names_is_kept_and_gone_on_from_without_settings() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        i=0
        [ -z "$3" ] || i=$(cat "$3")
        [ $i != 2 ] || echo from $i > "$0/resumed"
        while [ $i -lt 4 ]; do
            i=$((i + 1))
            echo $i > "$2/at$i"
            printf '{{"loss": %d, "checkpoint": "%s"}}\n' $i "$2/at$i"
            while [ -e "$2/at$i" ]; do sleep 0.02; done
            [ $i != 2 ] || [ -e "$0/resumed" ] || { exit 7; }
        done"#;
    let argument = folder.path().display().to_string();
    let results = programs(folder.path(), 1)
        .max_failures(1.into())
        .run_programs([
            "sh",
            "-c",
            &script.replace("|| { ", "|| {{ ").replace("7; }", "7; }}"),
            &argument,
            "{x}",
            "{folder}",
            "{checkpoint}",
        ])
        .unwrap();
    let trial = &results.trials()[0];
    assert_eq!(trial.status, TrialStatus::Terminated, "{:?}", trial.error);
    assert!(
        folder.path().join("resumed").exists(),
        "from the newest one"
    );
    let kept = trial.checkpoint.as_ref().unwrap();
    assert_eq!(fs::read_to_string(kept.join("at4")).unwrap(), "4\n");
    let names = fs::read_dir(&trial.folder).unwrap().flatten();
    let names = names.map(|entry| entry.file_name().display().to_string());
    let kept = names.filter(|name| name.starts_with("checkpoint_")).count();
    assert_eq!(kept, 2, "the newest and the best");
    let best = results.best_result("loss", Mode::Min).unwrap();
    assert_eq!(best.result.training_iteration, 1);
    assert_eq!(
        fs::read_to_string(&best.checkpoint.unwrap().0).unwrap(),
        "1\n"
    );
}

#[test]
fn a_program_that_reports_nothing_fails() {
    let folder = tempfile::tempdir().unwrap();
    let results = run(programs(folder.path(), 1), folder.path(), ":");
    let trial = &results.trials()[0];
    assert_eq!(trial.status, TrialStatus::Error);
    let error = trial.error.as_ref().unwrap();
    assert!(error.contains("it ended without a report"), "{error}");
}

#[test]
fn a_time_budget_may_be_longer_than_clocks_reach() {
    let folder = tempfile::tempdir().unwrap();
    let search = programs(folder.path(), 1).time_budget(Duration::from_secs(1 << 63));
    let results = run(search, folder.path(), r#"echo '{{"loss": 1}}'"#);
    assert_eq!(results.trials()[0].status, TrialStatus::Terminated);
}

/// The reports are more than the search reads ahead, and come through both channels.
#[test]
fn no_report_is_lost_however_fast_a_program_prints_or_writes_to_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let script = "case $1 in 0) exec 3>&1;; *) exec 3>\"$3\";; esac
                  i=0; while [ $i -lt 2500 ]; do echo \"{{\\\"loss\\\": $i}}\" >&3; i=$((i + 1)); done";
    let argument = folder.path().display().to_string();
    let results = programs(folder.path(), 2)
        .run_programs([
            "sh",
            "-c",
            script,
            &argument,
            "{x}",
            "{folder}",
            "{metrics}",
        ])
        .unwrap();
    for trial in results.trials() {
        let last = trial.last.as_ref().unwrap();
        assert_eq!(last.training_iteration, 2500, "{:?}", trial.error);
        assert_eq!(last.value("loss"), Some(2499.0));
    }
}

/// The program has ended when the search takes up its first report.
#[test]
fn no_report_is_lost_however_long_the_search_takes_over_one() {
    let folder = tempfile::tempdir().unwrap();
    let search = programs(folder.path(), 1).stop(Stop::new().when(|_, result| {
        // The second pause is longer than the search waits for what an ended program has left.
        let seconds = match result.training_iteration {
            1 => 1,
            1400 => 6,
            _ => 0,
        };
        std::thread::sleep(Duration::from_secs(seconds));
        false
    }));
    let script = "i=0; while [ $i -lt 1500 ]; do echo \"{{\\\"loss\\\": $i}}\"; i=$((i + 1)); done";
    let results = run(search, folder.path(), script);
    let last = results.trials()[0].last.as_ref().unwrap();
    assert_eq!(last.training_iteration, 1500);
}
