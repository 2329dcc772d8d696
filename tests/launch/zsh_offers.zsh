# Prints what an interactive zsh offers to complete a line, one word a line, and
# then "line: " and what it makes of the line.
#
#   zsh zsh_offers.zsh SCRIPT LINE
#
# SCRIPT is that of `lockstep completion zsh`. HOME is an empty folder.
zmodload zsh/zpty
cat > $HOME/.zshrc <<'END'
. $SCRIPT
compadd() {
  local -a offered
  builtin compadd -O offered "$@"
  print -rl -- $offered >> $HOME/offers
  builtin compadd "$@"
}
leave() { print -r -- "line: $BUFFER" >> $HOME/offers; exit }
zle -N leave
bindkey '^Xq' leave
END
export SCRIPT=$1 ZDOTDIR=$HOME TERM=dumb
zpty shell zsh -i
# A tab completes, and ^Xq leaves the shell, which ends the terminal.
zpty -n -w shell "$2"$'\t\x18q'
while zpty -r shell text; do :; done
zpty -d shell
cat $HOME/offers
