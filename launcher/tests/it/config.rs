//! `accel-launch config`, and the file of settings.

use crate::support::Folder;

#[test]
fn the_file_of_settings_is_beneath_variables_and_flags() {
    let folder = Folder::new();
    folder.script("train.sh", "echo $ACCEL_PRECISION");
    let home = folder.path().display().to_string();
    let set = [("HOME", home.as_str())];
    let wrote = folder.launch_with(
        "config --num_processes 2 --mixed_precision fp16 -q --gpu-ids=0,1 --grace 0.5",
        set,
    );
    let path = ".config/accel-launch/config.toml";
    let text = folder.read(path);
    assert!(text.starts_with("# Settings of accel-launch."), "{text}");
    let settings = "num-processes = 2\ngpu-ids = \"0,1\"\ngrace = \"0.5\"\nmixed-precision = \"fp16\"\nquiet = true\n";
    assert!(text.ends_with(settings), "{text}");
    wrote
        .expect(0)
        .prints(&format!("{home}/{path}"))
        .prints(settings);

    let origin = format!("{home}/{path}");
    let shown = folder.launch_with("--dry-run ./train.sh", set).expect(0);
    let shown = shown.shows(&format!("processes 2 {origin}"));
    shown.shows(&format!("ACCEL_PRECISION f16 {origin}"));
    // A flag, a variable, the file, a default.
    let variables = [set[0], ("ACCEL_PRECISION", "bf16")];
    folder
        .launch_with("env --num-processes 1", variables)
        .expect(0)
        .shows(&format!("file of settings {origin} accel-launch config"))
        .shows("processes 1 --num-processes")
        .shows("ACCEL_PRECISION bf16 environment")
        .shows(&format!("grace 0.5 s {origin}"))
        .shows("restarts 0 default");
    let json = folder.launch_with("env --json", set).expect(0).json();
    assert_eq!(json["config_file"], origin);
    assert!(
        json["launch"]
            .as_array()
            .unwrap()
            .iter()
            .any(|row| row["origin"] == origin)
    );
    // Several hosts of the file are not those of a job that a flag starts here.
    folder.write(
        "cluster.toml",
        "hosts = \"a:2,b:2\"\nrsync = [\"train.sh\", \"cluster.toml\"]\nmax_restarts = 1\n",
    );
    let shown = folder
        .launch("--config_file cluster.toml --dry-run -n 3 ./train.sh")
        .expect(0);
    shown
        .shows("processes 3 --num-processes")
        .shows("restarts 1 cluster.toml");
    let shown = folder
        .launch("--config-file=cluster.toml --dry-run ./train.sh")
        .expect(0);
    assert!(
        shown
            .lines()
            .iter()
            .any(|line| line.starts_with("host 1: b: ssh")),
        "{shown:?}"
    );
    // The ranks get the variables, and another file is in the place of the default one.
    assert_eq!(
        folder.launch_with("-n 1 ./train.sh", set).expect(0).text(),
        "f16\n"
    );
    let none = folder.launch_with("--config-file /dev/null -n 1 -q ./train.sh", set);
    assert_eq!(none.expect(0).text(), "\n");
}

#[test]
fn a_wrong_file_of_settings_is_an_error_that_names_the_line_or_the_key() {
    let folder = Folder::new();
    folder.script("train.sh", "true");
    for (name, content, text) in [
        (
            "a.toml",
            "num_procesess = 2\n",
            "a.toml: there is no setting num_procesess: did you mean num-processes?",
        ),
        (
            "a.toml",
            "use_fsdp = true\n",
            "a.toml: there is no setting use_fsdp: wrap the blocks",
        ),
        (
            "a.toml",
            "num_gpus = 2\n",
            "there is no setting num_gpus: write num-processes",
        ),
        (
            "a.toml",
            "xyz = 2\n",
            "there is no setting xyz: `accel-launch --help` lists them",
        ),
        ("a.toml", "script = \"x\"\n", "there is no setting script"),
        (
            "a.toml",
            "num-processes = 0\n",
            "a.toml: invalid value '0' for '--num-processes",
        ),
        (
            "a.toml",
            "quiet = 3\n",
            "a.toml: quiet: expected true or false",
        ),
        (
            "a.toml",
            "log-dir = true\n",
            "a.toml: log-dir: expected a text or a number",
        ),
        ("a.toml", "quiet = true\nhosts =\n", "a.toml: line 2: "),
        (
            "a.yaml",
            "num_processes: 2\n",
            "YAML, as accelerate writes it, is not read",
        ),
    ] {
        folder.write(name, content);
        let ended = folder
            .launch(&format!("--config-file {name} ./train.sh"))
            .expect(2)
            .says(text);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
    folder.refuses("config", "nothing to write: give settings, such as");
    folder.refuses(
        "config --config-file b.toml --example x",
        "says what to run, and the file of settings how",
    );
    folder.refuses("env train.sh", "`env` starts no program");
    assert!(folder.ok("--help").contains("--config-file <FILE>"));
}
