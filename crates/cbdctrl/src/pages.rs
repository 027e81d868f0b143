//! Completions and man pages, from the definitions in [`crate::cli`].

use crate::cli::{Cli, DaemonCli};
use clap::CommandFactory;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// Prints completions for `shell`.
pub fn completions(shell: clap_complete::Shell) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cbdctrl", &mut text);
    if shell == clap_complete::Shell::Bash || shell == clap_complete::Shell::Fish {
        clap_complete::generate(shell, &mut DaemonCli::command(), "cbdd", &mut text);
    }
    ended(io::stdout().write_all(&text), || "the completions cannot be printed".to_owned())
}

/// Writes man pages into `folder`: one for each command, one for the daemon.
pub fn man(folder: &Path) -> ExitCode {
    ended(
        std::fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), folder))
            .and_then(|()| {
                let mut page = Vec::new();
                clap_mangen::Man::new(DaemonCli::command()).section("8").render(&mut page)?;
                std::fs::write(folder.join("cbdd.8"), page)
            }),
        || format!("man pages cannot be written into {}", folder.display()),
    )
}

fn ended(result: io::Result<()>, what: impl FnOnce() -> String) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads a pipe may have seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbdctrl: {}: {error}", what());
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_for_people_has_a_man_page() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(man(folder.path()), ExitCode::SUCCESS);
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = folder.path().join(format!("cbdctrl-{}.1", command.get_name()));
            assert!(std::fs::read_to_string(&page).unwrap().contains(".TH"), "{}", page.display());
        }
        assert!(folder.path().join("cbdctrl.1").exists());
        assert!(folder.path().join("cbdd.8").exists());
    }
}
