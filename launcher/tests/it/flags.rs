//! Command lines as people know them from other launchers, mistakes, and the file of settings.

use crate::support::{Ended, Folder};

/// The beginning of a line, and what a dry run shows or what the error says.
const TYPED: &[(&str, Result<&str, &str>)] = &[
    // accelerate launch
    ("--num_processes 2", Ok("processes 2 --num-processes")),
    ("--num_processes=2 --cpu", Ok("ACCEL_DEVICE flex --device")),
    (
        "--cpu --device ndarray",
        Ok("ACCEL_DEVICE ndarray --device"),
    ),
    (
        "--mixed_precision bf16",
        Ok("ACCEL_PRECISION bf16 --mixed-precision"),
    ),
    (
        "--mixed_precision=fp16",
        Ok("ACCEL_PRECISION f16 --mixed-precision"),
    ),
    ("--mixed_precision fp8", Err("expected no, f16 or bf16")),
    (
        "--gradient_accumulation_steps 4",
        Ok("ACCEL_ACCUMULATION_STEPS 4 --gradient-accumulation-steps"),
    ),
    ("--gpu_ids all", Ok("GPUs all --gpu-ids")),
    (
        "--multi_gpu --num_processes 2",
        Ok("processes 2 --num-processes"),
    ),
    (
        "--multi_gpu --gpu_ids 3,4",
        Ok("processes 2 --nproc-per-node"),
    ),
    (
        "--num_cpu_threads_per_process 3",
        Ok("OMP_NUM_THREADS 3 --threads-per-process"),
    ),
    (
        "--main_process_ip 127.0.0.1",
        Ok("store host 127.0.0.1 --master-addr"),
    ),
    (
        "--main_process_port 29511",
        Ok("store port 29511 --master-port"),
    ),
    (
        "--num_machines 2 --machine_rank 1 --main_process_ip h --nproc_per_node 3",
        Ok("host 0 listens at h:29400 --rdzv-endpoint"),
    ),
    (
        "--num_machines 2 --machine_rank 0 --main_process_ip h --num_processes 4",
        Err("give --nproc-per-node, the number of ranks on this host"),
    ),
    (
        "--dynamo_backend no --same_network -n 2",
        Ok("processes 2 --num-processes"),
    ),
    (
        "--dynamo_backend=inductor",
        Err("--dynamo_backend inductor is not an option of accel-launch: kernels"),
    ),
    (
        "--use_deepspeed",
        Err("--use_deepspeed is not an option of accel-launch: for ZeRO stage 1 write"),
    ),
    ("--zero_stage 3", Err("for ZeRO stage 1 write")),
    ("--use_fsdp", Err("`prepare((model, Sharded(optimizer)))`")),
    (
        "--fsdp_offload_params true",
        Err("`prepare((model, Sharded(optimizer)))`"),
    ),
    ("--use_megatron_lm", Err("every rank has the whole model")),
    ("--tpu", Err("write --device cuda, wgpu, flex or ndarray")),
    (
        "-m pkg.train",
        Err("write accel-launch [OPTIONS] python -m MODULE"),
    ),
    (
        "--module pkg.train",
        Err("write accel-launch [OPTIONS] python -m MODULE"),
    ),
    (
        "--config_file no.yaml",
        Err("no.yaml cannot be read; `accel-launch config` writes one"),
    ),
    // torchrun
    (
        "--standalone --nproc_per_node=2",
        Ok("processes 2 --nproc-per-node"),
    ),
    (
        "--standalone --nnodes=1 --nproc-per-node 2",
        Ok("processes 2 --nproc-per-node"),
    ),
    ("--nproc 2", Ok("processes 2 --nproc-per-node")),
    (
        "--nnodes 2 --node_rank 0 --rdzv_backend c10d --rdzv_id 7 --rdzv_endpoint h:7 --nproc_per_node 1",
        Ok("host 0 listens at h:7 --rdzv-endpoint"),
    ),
    (
        "--rdzv_backend=etcd",
        Err("host 0 serves the rendezvous itself"),
    ),
    ("--tee 3", Err("with --log-dir DIR")),
    (
        "--max_restarts=3 --monitor_interval 1",
        Ok("restarts 3 --max-restarts"),
    ),
    (
        "--local_addr 10.0.0.1",
        Err("write --network-interface NAME"),
    ),
    // mpirun and srun
    ("-np 2", Ok("processes 2 --num-processes")),
    ("--np=2", Ok("processes 2 --num-processes")),
    (
        "-np 2 -x PATH --bind-to none --allow-run-as-root",
        Ok("processes 2 --num-processes"),
    ),
    (
        "-x A=1 -np 2",
        Err("-x A=1 is not an option of accel-launch: ranks inherit the environment"),
    ),
    ("--bind-to core -np 2", Err("write --threads-per-process N")),
    ("-ppn 2", Ok("processes 2 --nproc-per-node")),
    (
        "-N 2",
        Err("--nnodes for srun and --nproc-per-node for mpirun"),
    ),
    ("-H a:2,b:2", Ok("host 1: b: ssh")),
    ("-hostfile hosts", Ok("host 1: node1: ssh")),
    (
        "-np 4 -H a:2,b:2",
        Err("hosts have their own numbers, as in --hosts host0:4,host1:4"),
    ),
    ("-mca btl tcp", Err("it is for Open MPI, so leave it out")),
    // deepspeed
    ("--num_gpus 2", Ok("processes 2 --num-processes")),
    ("--include localhost:0,1", Err("write --gpu-ids 0,2")),
];

fn dry_run(folder: &Folder, line: &str) -> Ended {
    folder.launch(&format!(
        "{line} --dry-run ./train.sh --cpu -np 9 --num_procesess"
    ))
}

#[test]
fn flags_of_other_launchers_work_or_the_error_says_what_to_write() {
    let folder = Folder::new();
    folder.script("train.sh", "true");
    folder.write("hosts", "node0 slots=2\nnode1 slots=2\n");
    for (line, expected) in TYPED {
        let ended = dry_run(&folder, line);
        match expected {
            Ok(row) => {
                let ended = ended.expect(0);
                let rows = ended.lines();
                assert!(
                    rows.iter().any(|shown| shown.starts_with(row)),
                    "{line}: {row:?} is not in {rows:#?}"
                );
                // What stands behind the program is its own.
                let is_ssh = line.contains("-H") || line.contains("hostfile");
                assert!(
                    is_ssh
                        || ended
                            .text()
                            .contains("train.sh --cpu -np 9 --num_procesess"),
                    "{line}"
                );
            }
            Err(text) => {
                let ended = ended.expect(2).says(text);
                assert!(ended.stdout.is_empty(), "{line}");
                assert!(!ended.stderr.contains("tip:"), "{line}: {}", ended.stderr);
            }
        }
    }
}

#[test]
fn a_mistake_is_one_line_and_a_line_of_usage() {
    let folder = Folder::new();
    folder.script("train.sh", "true");
    folder.write("train.py", "");
    for (line, text) in [
        (
            "--num-proceses 2 ./train.sh",
            "unexpected argument '--num-proceses' found; did you mean '--num-processes'?",
        ),
        (
            "--mixed-percision bf16 ./train.sh",
            "did you mean '--mixed-precision'?",
        ),
        (
            "--nproc-per-nod 2 ./train.sh",
            "did you mean '--nproc-per-node'?",
        ),
        (
            "--cpu-only ./train.sh",
            "unexpected argument '--cpu-only' found",
        ),
        ("-n two ./train.sh", "expected a whole number of at least 1"),
        (
            "--mixed-precision half ./train.sh",
            "invalid value 'half' for '--mixed-precision <no|bf16|f16>': expected no, f16 or bf16",
        ),
        (
            "--gradient-accumulation-steps 0 ./train.sh",
            "expected at least 1",
        ),
        (
            "--use_fsdp ./train.sh",
            "--use_fsdp is not an option of accel-launch",
        ),
        ("env --jsn", "did you mean '--json'?"),
        ("runs lst", "did you mean 'list'?"),
    ] {
        let ended = folder.launch(line).expect(2).says(text);
        let lines: Vec<_> = ended.stderr.lines().collect();
        assert_eq!(lines.len(), 2, "{line}: {lines:#?}");
        assert!(
            lines[0].starts_with("error: ") && lines[1].starts_with("usage: accel-launch"),
            "{lines:#?}"
        );
        assert!(!ended.stderr.contains("as a value"), "{lines:#?}");
    }
    for (line, text) in [
        ("no-such", "the script no-such cannot be found"),
        ("train.py", "write `accel-launch [OPTIONS] python train.py`"),
        ("no-such.rs", "the source file no-such.rs cannot be found"),
        ("-n 2", "nothing to start"),
    ] {
        folder.refuses(line, text);
    }
    for (name, meant) in [
        ("ACCEL_MIXED_PRECISION", "ACCEL_PRECISION"),
        ("ACCEL_TRASNPORT", "ACCEL_TRANSPORT"),
    ] {
        let ended = folder
            .launch_with("-n 2 ./train.sh", [(name, "1")])
            .expect(2);
        ended.says(&format!("{name} is not known; did you mean {meant}?"));
    }
}

#[test]
fn options_set_the_variables_that_programs_read() {
    let folder = Folder::new();
    folder.script(
        "show.sh",
        "echo $ACCEL_PRECISION $ACCEL_ACCUMULATION_STEPS $ACCEL_DEVICE",
    );
    let line =
        "--mixed_precision fp16 --gradient_accumulation_steps 4 --cpu --no-prefix -q ./show.sh";
    let set = [("ACCEL_PRECISION", "bf16")];
    assert_eq!(
        folder.launch_with(line, set).expect(0).text(),
        "f16 4 flex\n"
    );
    assert_eq!(
        folder
            .launch_with("-n 1 -q ./show.sh", set)
            .expect(0)
            .text(),
        "bf16\n"
    );
    assert_eq!(folder.ok("-n 1 -q ./show.sh"), "\n");
}

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
            "a.toml: there is no setting use_fsdp: for ZeRO stage 1",
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
