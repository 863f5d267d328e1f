"""Whether a chat template looks at the parts of a message's content one by one.

As in vLLM (its renderers/hf.py) that is read from the template's syntax tree: it has a loop over
`content` of something that comes from `messages`, over a variable that holds such content or is
called `content`, or over a parameter of a macro that is called with it.
"""

from collections.abc import Iterator

from jinja2 import nodes


def loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template loops over the content of a message."""
    message_names, content_names = _find_names(tree)
    content_parameters = {
        (macro.name, parameter)
        for macro, parameter, value in _arguments(tree)
        if _is_content(value, message_names, content_names)
    }
    macro_of = {
        id(loop): macro
        for macro in tree.find_all(nodes.Macro)
        for loop in macro.find_all(nodes.For)
    }
    for loop in tree.find_all(nodes.For):
        source, macro = _without_filters(loop.iter), macro_of.get(id(loop))
        parameters = {parameter.name for parameter in macro.args} if macro else set[str]()
        if macro and isinstance(source, nodes.Name) and source.name in parameters:
            is_over_content = (macro.name, source.name) in content_parameters
        else:
            is_over_content = _is_content(source, message_names, content_names)
        if is_over_content:
            return True
    return False


def _find_names(tree: nodes.Template) -> tuple[set[str], set[str]]:
    """Variables that hold messages, or one of them; and those that hold the content of one."""
    message_names, content_names = {"messages"}, {"content"}
    bindings = list(_bindings(tree))
    num_found = 0
    # One variable may be set from another that is set further down.
    while num_found != len(message_names) + len(content_names):
        num_found = len(message_names) + len(content_names)
        for name, value in bindings:
            if _is_message(value, message_names):
                message_names.add(name)
            elif _is_content(value, message_names, content_names):
                content_names.add(name)
    return message_names, content_names


def _bindings(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """Variables, and what they are set to or take their values from."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name):
            yield loop.target.name, loop.iter


def _arguments(tree: nodes.Template) -> Iterator[tuple[nodes.Macro, str, nodes.Node]]:
    """Macros, their parameters, and what these are in a call."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, value in zip(macro.args, call.args, strict=False):
            yield macro, parameter.name, value
        for keyword in call.kwargs:
            yield macro, keyword.key, keyword.value


def _is_content(node: nodes.Node, message_names: set[str], content_names: set[str]) -> bool:
    match _without_filters(node):
        case nodes.Name(name=name):
            return name in content_names
        case nodes.Getattr(node=owner, attr="content"):
            return _is_message(owner, message_names)
        case nodes.Getitem(node=owner, arg=nodes.Const(value="content")):
            return _is_message(owner, message_names)
    return False


def _is_message(node: nodes.Node, message_names: set[str]) -> bool:
    """Whether it is one of the variables, or the item of one at a number."""
    match _without_filters(node):
        case nodes.Name(name=name):
            return name in message_names
        case nodes.Getitem(arg=nodes.Const(value=str())):
            return False
        case nodes.Getitem(node=owner):
            return _is_message(owner, message_names)
    return False


def _without_filters(node: nodes.Node) -> nodes.Node:
    """What filters and slices are applied to."""
    match node:
        case nodes.Filter(node=nodes.Node() as inner):
            return _without_filters(inner)
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _without_filters(inner)
    return node
