# The formula of a tap, filled in by `python packaging/homebrew/formula.py dist/fleetd-VERSION.tar.gz`.
class Fleetd < Formula
  desc "Local LLM service that lets several unified-memory machines answer as one"
  homepage "@HOMEPAGE@"
  url "https://files.pythonhosted.org/packages/source/f/fleetd/@FILE@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "python@3.13"

  on_macos do
    depends_on arch: :arm64
    depends_on macos: :sonoma
  end

  # pip gets the packages that fleetd needs, in the step after installation.
  allow_network_access! :postinstall

  def install
    libexec.install Dir["*"]
    # The path in opt stays the same when Python gets a newer patch release.
    python = formula_opt_libexec("python@3.13")/"bin/python"
    (libexec/"make-environment").write <<~SH
      #!/bin/sh -e
      rm -rf "#{opt_libexec}/environment"
      "#{python}" -m venv "#{opt_libexec}/environment"
      "#{opt_libexec}/environment/bin/pip" install --no-cache-dir "#{opt_libexec}"
    SH
    chmod 0755, libexec/"make-environment"
    # The environment is made after installation; these names are linked before.
    %w[fleetd fleetctl].each do |name|
      (bin/name).write <<~SH
        #!/bin/sh
        exec "#{opt_libexec}/environment/bin/#{name}" "$@"
      SH
    end
  end

  # Wheels hold libraries whose headers leave Homebrew no room to rewrite their paths, which it does to
  # everything that is there before this step.
  post_install_steps do
    run "make-environment", base: :libexec
  end

  service do
    run [opt_bin/"fleetd", "run"]
    keep_alive crashed: true
    log_path var/"log/fleetd.log"
    error_log_path var/"log/fleetd.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/fleetd --version")
    assert_match "No daemon", shell_output("#{bin}/fleetctl --home #{testpath}/none status 2>&1", 3)
  end
end
