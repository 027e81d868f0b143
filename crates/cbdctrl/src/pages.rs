//! Man pages, from the definitions in [`crate::cli`] and [`crate::examples`], and that of `blkverify`.

use crate::cli::{Cli, DaemonCli, Numbers};
use crate::{completions, examples};
use clap::CommandFactory;
use clap_mangen::Man;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// Prints completions for `shell`.
pub fn completions(shell: clap_complete::Shell) -> ExitCode {
    let text = completions::text(shell);
    ended(io::stdout().write_all(text.as_bytes()), || "the completions cannot be printed".to_owned())
}

/// Prints the numbers of the daemon's objects, for completions.
pub fn numbers(kind: Numbers, transport: u32, socket: &Path) -> ExitCode {
    let text = completions::numbers(kind, transport, socket);
    ended(io::stdout().write_all(text.as_bytes()), || "the numbers cannot be printed".to_owned())
}

/// Writes man pages below `folder`: one in `man1` for each command, one in `man8` for the daemon. If `folder` itself is
/// named `man1`, as with earlier versions, its parent is used.
pub fn man(folder: &Path) -> ExitCode {
    let is_section = folder.file_name().is_some_and(|name| name == "man1");
    let root = folder.parent().filter(|_| is_section).unwrap_or(folder);
    ended(write_pages(root), || format!("man pages cannot be written into {}", root.display()))
}

fn write_pages(root: &Path) -> io::Result<()> {
    let (commands, daemon) = (root.join("man1"), root.join("man8"));
    std::fs::create_dir_all(&commands)?;
    std::fs::create_dir_all(&daemon)?;
    clap_mangen::generate_to(Cli::command(), &commands)?;
    for command in Cli::command().get_subcommands() {
        let path = commands.join(format!("cbdctrl-{}.1", command.get_name()));
        let section = examples::section(command.get_name());
        if !section.is_empty() {
            std::fs::File::options().append(true).open(path)?.write_all(section.as_bytes())?;
        }
    }
    clap_mangen::generate_to(blkverify::cli::Cli::command(), &commands)?;
    let mut page = Vec::new();
    Man::new(DaemonCli::command()).section("8").render(&mut page)?;
    page.extend(examples::section("daemon").into_bytes());
    std::fs::write(daemon.join("cbdd.8"), page)
}

fn ended(result: io::Result<()>, what: impl FnOnce() -> String) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe may have closed it.
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
    fn every_visible_command_has_a_man_page_with_examples() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(man(folder.path()), ExitCode::SUCCESS);
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = folder.path().join(format!("man1/cbdctrl-{}.1", command.get_name()));
            let text = std::fs::read_to_string(&page).unwrap();
            assert!(text.contains(".TH") && text.contains(".SH EXAMPLES"), "{}", page.display());
        }
        assert!(folder.path().join("man1/cbdctrl.1").exists());
        let page = std::fs::read_to_string(folder.path().join("man1/blkverify.1")).unwrap();
        assert!(page.contains(".TH blkverify 1") && page.contains("Exit codes"), "{page}");
    }

    #[test]
    fn the_page_of_the_daemon_is_in_section_8() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(man(&folder.path().join("man1")), ExitCode::SUCCESS);
        let page = std::fs::read_to_string(folder.path().join("man8/cbdd.8")).unwrap();
        assert!(page.contains(".TH cbdd 8"), "{page}");
        assert!(folder.path().join("man1/cbdctrl-status.1").exists(), "beside the commands of section 1");
        assert!(!folder.path().join("man1/cbdd.8").exists() && !folder.path().join("man1/man1").exists());
    }
}
