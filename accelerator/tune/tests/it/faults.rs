use std::fs;
use std::process::Child;

use accelerator_tune::{SearchFolder, TrialStatus};
use rustix::process::{Pid, Signal};

use crate::support::{
    assert_nothing_left, decisions, ended, in_namespaces, processes, quadratic, refused, search,
    succeed, wait_for_decisions, wait_until,
};

#[test]
fn a_trial_that_fails_says_why() {
    let folder = tempfile::tempdir().unwrap();
    for (fault, expected) in [
        ("error", "the data set is empty"),
        ("panic", "it panicked: the loss is not a number"),
        ("exit", "exit status: 7; its last lines:\nout of luck"),
    ] {
        let path = folder.path().join(fault);
        let arguments = format!("--num-samples 2 --fault {fault} --max-failures 2");
        succeed(&path, &arguments);
        let search = SearchFolder::open(&path).unwrap();
        for trial in search.results().trials() {
            assert_eq!(trial.status, TrialStatus::Error);
            assert_eq!(trial.failures, 3);
            let error = trial.error.as_deref().unwrap();
            assert!(error.contains(expected), "{fault}: {error}");
            let file = fs::read_to_string(trial.folder.join("error.txt")).unwrap();
            assert_eq!(file.trim_end(), error);
        }
    }
}

#[test]
fn a_trial_may_end_by_itself_and_report_what_is_no_number() {
    let folder = tempfile::tempdir().unwrap();
    for (fault, iterations) in [("end", 3), ("nan", 6)] {
        let path = folder.path().join(fault);
        let arguments = format!("--num-samples 1 --max-iterations 6 --fault {fault}");
        succeed(&path, &arguments);
        let search = SearchFolder::open(&path).unwrap();
        let trial = &search.results().trials()[0];
        assert_eq!(trial.status, TrialStatus::Terminated);
        let last = trial.last.as_ref().unwrap();
        assert_eq!(last.training_iteration, iterations);
        assert_eq!(last.value("loss").unwrap().is_nan(), fault == "nan");
    }
}

#[test]
fn a_trial_that_hangs_or_whose_process_never_connects_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    for fault in ["hang", "no-connection"] {
        let path = folder.path().join(fault);
        let arguments = format!("--num-samples 2 --fault {fault} --report-timeout 0.5 --slots 1");
        succeed(&path, &arguments);
        let search = SearchFolder::open(&path).unwrap();
        for trial in search.results().trials() {
            let error = trial.error.as_deref().unwrap();
            assert!(error.contains("did not report within 500ms"), "{error}");
        }
        assert_nothing_left(&path);
    }
}

#[test]
fn a_trial_that_waits_for_its_turn_does_not_hang() {
    let folder = tempfile::tempdir().unwrap();
    // Each trial waits for seven others, which takes longer than the timeout. A trial itself takes a quarter of it.
    let arguments = "--num-samples 8 --ordered 8 --slots 1 --max-iterations 2 --report-timeout 4";
    let mut command = search(folder.path(), arguments);
    command.env("QUADRATIC_PAUSE_MS", "1000");
    assert!(ended(command.spawn().unwrap()).status.success());
    let search = SearchFolder::open(folder.path()).unwrap();
    let trials = search.results().trials();
    assert!(trials.iter().all(|trial| trial.error.is_none()));
}

#[test]
fn a_worker_that_computes_for_ever_ends_when_its_search_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = search(folder.path(), HANG).spawn().unwrap();
    wait_until("a second report", || {
        let journal = fs::read_to_string(folder.path().join("journal.jsonl"));
        journal.is_ok_and(|journal| journal.contains("\"training_iteration\":2"))
    });
    child.kill().unwrap();
    child.wait().unwrap();
    let left = SearchFolder::open(folder.path()).unwrap();
    let statuses = left.results().trials().iter().map(|trial| trial.status);
    assert_eq!(statuses.collect::<Vec<_>>(), [TrialStatus::Paused; 2]);
    assert_nothing_left(folder.path());
}

const HANG: &str = "--num-samples 2 --fault hang";

struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The worker has started but has not reached the search yet, and then another process has the search's process id.
#[test]
fn a_worker_whose_search_is_dead_does_not_become_a_search() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"
        "$SEARCH" --quiet --num-samples 1 --slots 1 --fault late --out "$OUT" &
        search=$!
        while ! [ -e "$OUT/late" ]; do sleep 0.05; done
        kill -KILL $search
        wait $search
        while :; do
            echo $((search - 1)) > /proc/sys/kernel/ns_last_pid || exit
            sleep 300 &
            [ $! = $search ] && break
            # Another process has started meanwhile.
            kill -KILL $!
            wait $!
        done
        touch "$OUT/go"
        wait"#;
    let Some(mut namespace) = in_namespaces("sh") else {
        return;
    };
    namespace
        .args(["-c", script])
        .env("SEARCH", quadratic())
        .env("OUT", folder.path());
    let namespace = KilledOnDrop(namespace.spawn().unwrap());
    wait_until("the end of the search", || {
        folder.path().join("go").exists()
    });
    assert_nothing_left(folder.path());
    drop(namespace);
    let log = fs::read_to_string(folder.path().join("logs/worker-00000.log")).unwrap();
    assert!(log.contains("cannot reach the search at"), "{log}");
    let journal = fs::read_to_string(folder.path().join("journal.jsonl")).unwrap();
    assert!(!journal.contains("reported"), "{journal}");
}

#[test]
fn a_program_that_a_worker_starts_may_be_a_search_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 1 --max-iterations 2 --fault nested";
    succeed(folder.path(), arguments);
    let search = SearchFolder::open(folder.path()).unwrap();
    let trial = &search.results().trials()[0];
    assert_eq!(trial.status, TrialStatus::Terminated, "{:?}", trial.error);
    let nested = SearchFolder::open(trial.folder.join("nested")).unwrap();
    assert_eq!(nested.results().trials()[0].status, TrialStatus::Terminated);
}

#[test]
fn two_searches_do_not_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = search(folder.path(), HANG).spawn().unwrap();
    wait_until("the first search", || {
        SearchFolder::open(folder.path()).is_ok_and(|search| search.process().is_some())
    });
    let said = refused(folder.path(), HANG);
    let expected = format!("carried out by process {}", first.id());
    assert!(said.contains(&expected), "{said}");
    first.kill().unwrap();
    first.wait().unwrap();
    assert_nothing_left(folder.path());
}

#[test]
fn a_search_that_is_interrupted_or_out_of_time_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 24 --ordered 2 --scheduler asha-promotion";
    let undisturbed = folder.path().join("undisturbed");
    succeed(&undisturbed, arguments);
    let path = folder.path().join("interrupted");
    let slow = |arguments: &str| {
        let mut command = search(&path, arguments);
        command.env("QUADRATIC_PAUSE_MS", "40").spawn().unwrap()
    };
    let child = slow(arguments);
    wait_for_decisions(&path, 8);
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    let output = ended(child);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(processes(&path).is_empty());
    assert_ne!(decisions(&path), decisions(&undisturbed));
    let budgeted = ended(slow(&format!("{arguments} --time-budget 0.2")));
    assert_eq!(budgeted.status.code(), Some(3));
    succeed(&path, arguments);
    assert_eq!(decisions(&path), decisions(&undisturbed));
}

#[test]
fn a_search_without_samples_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = refused(folder.path(), "--num-samples 0");
    assert!(said.contains("`num_samples` is 0"), "{said}");
}
