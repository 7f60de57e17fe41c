use std::fs;

use accelerator_tune::{Mode, Scope, SearchEnd, SearchFolder, TrialStatus};

use crate::support::{assert_nothing_left, decisions, ended, refused, search, succeed};

#[test]
fn decisions_are_the_same_at_any_number_of_slots_and_with_any_workers() {
    let folder = tempfile::tempdir().unwrap();
    for scheduler in ["asha", "asha-promotion", "pbt"] {
        let arguments =
            |more| format!("--num-samples 10 --ordered 4 --scheduler {scheduler} {more}");
        let first = folder.path().join(scheduler);
        succeed(&first, &arguments("--slots 4"));
        let expected = decisions(&first);
        assert!(expected.lines().count() > 30, "{expected}");
        for more in [
            "--slots 1",
            "--slots 2 --function",
            "--slots 3 --warm",
            "--slots 2 --warm --function",
        ] {
            let other = folder.path().join(format!("{scheduler} {more}"));
            succeed(&other, &arguments(more));
            assert_eq!(decisions(&other), expected, "{scheduler} {more}");
        }
    }
    assert_nothing_left(folder.path());
}

#[test]
fn a_search_with_a_stop_closure_is_read_back_as_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 5 --max-iterations 6 --stop-at-odd-trials --ordered 2";
    succeed(folder.path(), arguments);
    let read = SearchFolder::open(folder.path()).unwrap();
    assert_eq!(read.results().ending(), SearchEnd::Finished);
    let iterations = read.results().trials().iter().map(|trial| {
        assert_eq!(trial.status, TrialStatus::Terminated);
        trial.last.as_ref().unwrap().training_iteration
    });
    assert_eq!(iterations.collect::<Vec<_>>(), [6, 2, 6, 2, 6]);
}

#[test]
fn the_best_configuration_is_the_one_that_reported_the_best_value() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 6 --scheduler pbt --ordered 3";
    succeed(folder.path(), arguments);
    let search = SearchFolder::open(folder.path()).unwrap();
    let results = search.results();
    for mode in [Mode::Min, Mode::Max] {
        let (trial, value) = results.best_trial("loss", mode, Scope::Best).unwrap();
        let rows = fs::read_to_string(trial.folder.join("result.jsonl")).unwrap();
        let mut rows = rows
            .lines()
            .map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap());
        let row = rows
            .find(|row| row["loss"].as_f64() == Some(value))
            .unwrap();
        let best = results.best_config("loss", mode).unwrap();
        assert_eq!(
            serde_json::to_value(best).unwrap(),
            row["config"],
            "{mode:?}"
        );
    }
}

/// The test needs no device: GPUs are only named to the trials and hidden from others.
#[test]
fn a_gpu_is_reused_when_its_process_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    for scheduler in ["fifo", "asha", "asha-promotion", "pbt"] {
        let folder = folder.path().join(scheduler);
        let arguments = format!("--num-samples 8 --slots 2 --gpus 1 --scheduler {scheduler}");
        let mut command = search(&folder, &arguments);
        command.env("CUDA_VISIBLE_DEVICES", "0,1");
        let output = ended(command.spawn().unwrap());
        assert!(output.status.success(), "{scheduler}: {output:?}");
        let read = SearchFolder::open(&folder).unwrap();
        let mut trials = read.results().trials().iter();
        assert!(
            trials.all(|trial| trial.status == TrialStatus::Terminated),
            "{scheduler}"
        );
    }
    assert_nothing_left(folder.path());
}

#[test]
fn a_warm_worker_carries_out_several_trials_and_a_fresh_one_each() {
    let folder = tempfile::tempdir().unwrap();
    for (flag, workers) in [("--warm", 2), ("--cold", 6)] {
        let search = folder.path().join(flag);
        succeed(&search, &format!("--num-samples 6 --slots 2 {flag}"));
        let logs = fs::read_dir(search.join("logs")).unwrap().count();
        assert_eq!(logs, workers, "{flag}");
    }
}

#[test]
fn what_a_search_wrote_is_read_from_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 5 --max-iterations 4";
    succeed(folder.path(), arguments);
    let search = SearchFolder::open(folder.path()).unwrap();
    assert_eq!(search.spec().name, "Quadratic");
    assert_eq!(search.process(), None);
    let results = search.results();
    assert_eq!(results.ending(), SearchEnd::Finished);
    assert_eq!(results.trials().len(), 5);
    for trial in results.trials() {
        assert_eq!(trial.status, TrialStatus::Terminated);
        let history = results.history(trial.id).unwrap();
        assert_eq!(history.len(), 4);
        assert_eq!(history.last(), trial.last.as_ref());
        assert!(trial.folder.join("params.json").is_file());
        let progress = fs::read_to_string(trial.folder.join("progress.csv")).unwrap();
        assert_eq!(progress.lines().count(), 5, "{progress}");
    }
    let (best, value) = results.best_trial("loss", Mode::Min, Scope::Best).unwrap();
    let all = results
        .trials()
        .iter()
        .filter_map(|trial| trial.best.as_ref()?.value("loss"));
    assert_eq!(value, all.fold(f64::INFINITY, f64::min));
    assert_eq!(
        results.best_config("loss", Mode::Min),
        Some(best.config.clone())
    );
    let csv = fs::read_to_string(folder.path().join("results.csv")).unwrap();
    assert_eq!(csv, results.dataframe().to_string());
    assert_eq!(csv.lines().count(), 6);
    // A second run gives the same at once.
    let journal = || fs::read(folder.path().join("journal.jsonl")).unwrap();
    let before = journal();
    succeed(folder.path(), arguments);
    assert_eq!(journal(), before);
}

#[test]
fn shared_prefixes_are_trained_once_and_end_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let (apart, shared) = (folder.path().join("apart"), folder.path().join("shared"));
    let arguments = "--space schedules --num-samples 1 --slots 2";
    succeed(&apart, arguments);
    succeed(&shared, &format!("{arguments} --share-prefixes"));
    let ends = |folder| {
        let search = SearchFolder::open(folder).unwrap();
        let trials = search.results().trials().iter();
        trials
            .map(|trial| trial.last.as_ref().unwrap().metrics.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(ends(&apart), ends(&shared));
    let steps = |folder: &std::path::Path| {
        let journal = fs::read_to_string(folder.join("journal.jsonl")).unwrap();
        let lines = journal.lines();
        lines
            .filter(|line| line.starts_with("{\"reported\""))
            .count()
    };
    let (apart, shared) = (steps(&apart), steps(&shared));
    assert_eq!(apart, 9 * 16);
    assert!(shared * 10 <= apart * 7, "{shared}");
}

#[test]
fn a_folder_of_another_search_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    succeed(folder.path(), "--num-samples 2");
    let said = refused(folder.path(), "--num-samples 3");
    assert!(said.contains("its `num_samples` is 2, and now 3"), "{said}");
}
